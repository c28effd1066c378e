"""A pass over validation data that leaves no trace in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from training import rng
from training.data.protocol import Split
from training.loader import BatchMaker


class Validation(NamedTuple):
    """Mean loss over ``samples`` samples."""

    loss: float
    samples: int


def validate(
    model: nn.Module,
    split: Split,
    batch_size: int,
    limit: int | None,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """The model's mean loss over the first ``limit`` samples; None if ``stop()`` became true meanwhile.

    Random state and each module's train or eval mode are put back. Raises ValueError without samples.
    """
    count = len(split) if limit is None else min(limit, len(split))
    if count < 1:
        raise ValueError("there are no validation samples: raise data.val_fraction or trainer.eval_samples")
    make = BatchMaker(split, seed=0)
    modes = [(module, module.training) for module in model.modules()]
    total = torch.zeros((), dtype=torch.float64)
    try:
        model.eval()
        with rng.kept(), torch.no_grad():
            for start in range(0, count, batch_size):
                if stop():
                    return None
                end = min(start + batch_size, count)
                batch = make([(0, index) for index in range(start, end)])
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                total += model.loss(batch).double().cpu() * (end - start)  # type: ignore[operator]
    finally:
        for module, mode in modes:
            module.training = mode
    return Validation(float(total / count), count)
