"""Optimizers: functions of a model and their options."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def adamw(
    model: nn.Module,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: biases, norms and other vectors form a group without decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    first, second = betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=(first, second), eps=eps, foreach=True
    )
