"""A model with the weights of a committed checkpoint; reads the model's bytes and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import ckpt
from training.build import build
from training.quick import spare_the_compiler

PREFIX = "model."


def load_model(checkpoint: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of ``config["model"]`` in eval mode, with the checkpoint's weights.

    Raises ckpt.CheckpointError if the checkpoint is missing or damaged, or does not fit the model.
    """
    spare_the_compiler()
    model: nn.Module = build(config["model"])
    tensors = ckpt.load_tensors(checkpoint, prefix=PREFIX)
    stored = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    try:
        missing, unexpected = model.load_state_dict(stored, strict=False)
    except RuntimeError as error:  # shapes that differ, all of them listed
        raise ckpt.StateError(f"{checkpoint} does not fit the configured model: {error}") from error
    # A tied weight is stored once; its other names are there through the tensor they share.
    live = model.state_dict(keep_vars=True)
    given = {id(tensor) for key, tensor in live.items() if key in stored}
    missing = [key for key in missing if id(live[key]) not in given]
    if missing or unexpected:
        raise ckpt.StateError(
            f"{checkpoint} does not fit the configured model: missing {sorted(missing) or 'nothing'}, "
            f"unexpected {sorted(unexpected) or 'nothing'}"
        )
    return model.eval()
