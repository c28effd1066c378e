"""The optimizer's options after a resume: what the configuration changed acts, the rest stays as saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from training.schedules import Schedule

BASE = "initial_lr"  # the name that torch's own schedulers use for it


def remember_base(optimizer: torch.optim.Optimizer) -> None:
    """Note each group's configured learning rate, which the schedule's factor applies to."""
    for group in optimizer.param_groups:
        group[BASE] = group["lr"]


def apply_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int) -> float:
    """Set the learning rate of the update after ``step`` updates; returns the first group's."""
    factor = schedule(step)
    for group in optimizer.param_groups:
        group["lr"] = group[BASE] * factor
    lr: float = optimizer.param_groups[0]["lr"]
    return lr


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every group's options without its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def apply_changes(
    optimizer: torch.optim.Optimizer,
    configured: list[dict[str, Any]],
    saved: Mapping[str, Any] | None,
    now: Mapping[str, Any],
) -> list[str]:
    """Let options that the configuration changed since the checkpoint act; returns one line for each.

    ``configured`` are the groups' options as built from ``now``, ``saved`` is the checkpoint's configuration
    of the optimizer. One that did not change keeps its saved value, for the optimizer may have moved it.
    """
    if saved is None or dict(saved) == dict(now):
        return []
    lines = []
    for name in sorted({*saved, *now}):
        if saved.get(name) == now.get(name):
            continue
        lines.append(f"optim.{name} was {saved.get(name)!r} and is {now.get(name)!r} now")
        for group, fresh in zip(optimizer.param_groups, configured, strict=True):
            for option in (name, BASE) if name == "lr" else (name,):
                if option in fresh:
                    group[option] = fresh[option]
    return lines
