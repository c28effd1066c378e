"""A model with the weights of a committed checkpoint; reads the model's bytes and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import ckpt
from training.build import build
from training.quick import spare_the_compiler


def load_model(checkpoint: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of ``config["model"]`` in eval mode, with the checkpoint's weights.

    Raises ckpt.CheckpointError if the checkpoint is missing or damaged, or does not fit the model.
    """
    spare_the_compiler()
    model: nn.Module = build(config["model"])
    stored = ckpt.load_tensors(checkpoint, prefix="model.")
    try:
        model.load_state_dict(stored)
    except RuntimeError as error:  # it lists every name and shape that differs
        raise ckpt.StateError(f"{checkpoint} does not fit the configured model: {error}") from error
    return model.eval()
