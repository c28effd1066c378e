"""One process, one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.group import Group


class Single:
    """The model as it is. Raises ValueError when started with more than one rank."""

    def __init__(self) -> None:
        self.group: Any = None

    def setup(self, group: Group, device: torch.device) -> None:
        """Check that there is one rank."""
        if group.world_size != 1:
            raise ValueError(
                f"strategy=single trains on one rank, and {group.world_size} were started: "
                "set launcher.nproc=1"
            )
        self._device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to the device."""
        return model.to(self._device)

    def sync(self, model: nn.Module, last: bool) -> None:
        """Nothing to synchronise."""

    def clip(self, model: nn.Module, norm: float) -> Tensor:
        """Scale gradients down to ``norm``; returns the norm they had."""
        return nn.utils.clip_grad_norm_(model.parameters(), norm, foreach=True)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks."""
        return value
