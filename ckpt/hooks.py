"""Hooks: before any optimizer of the process moves, and in every process that is forked from this one."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def before_any_optimizer_step(work: Callable[[], None]) -> Callable[[], None]:
    """Call `work` before every `optimizer.step`, compiled ones included; returns what ends that."""

    def hook(*_: Any) -> None:
        work()

    # What torch.compile meets here must stay out of its graphs. torch.compiler.disable says so but
    # imports dynamo,
    # which takes seconds; the mark that it leaves is enough.
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules:
        import torch

        hook = torch.compiler.disable(hook)
    return register_optimizer_step_pre_hook(hook).remove


def in_forked_children(work: Callable[[], None]) -> None:
    """Call `work`, a method, first of all in every process that is forked off while its object lives."""
    method = weakref.WeakMethod(work)

    def hook() -> None:
        if (alive := method()) is not None:
            alive()

    os.register_at_fork(after_in_child=hook)
