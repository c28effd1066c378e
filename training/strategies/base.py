"""What the loop asks of a strategy: everything that depends on how the model is spread over ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.group import Group


class Strategy(Protocol):
    """``group`` is the process group of the ranks, None for one rank alone."""

    group: Any

    def setup(self, group: Group, device: torch.device) -> None:
        """Join the other ranks. Called once, before the model is built."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to train, on the device. The optimizer is made from its parameters."""
        ...

    def sync(self, model: nn.Module, last: bool) -> None:
        """Called before each forward: gradients need to be shared only in the ``last`` micro-batch."""
        ...

    def clip(self, model: nn.Module, norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``norm``; returns what it was."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a scalar over ranks."""
        ...
