"""What a manager's caller hands in, checked and made plain."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ckpt.errors import StateError
from ckpt.names import MAX_STEP


def check_options(max_failed_saves: int, when_busy: str, slots: int, rank_timeout_s: float) -> None:
    """Raise StateError for options of a manager that make no sense."""
    if when_busy not in ("skip", "wait"):
        raise StateError(f"when_busy must be 'skip' or 'wait', not {when_busy!r}")
    for name, value in (("max_failed_saves", max_failed_saves), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StateError(f"{name} must be a whole number from 1 on, not {value!r}")
    if not rank_timeout_s > 0:
        raise StateError(f"rank_timeout_s must be above 0 seconds, not {rank_timeout_s!r}")


def check_usable(closed: bool, went_on: bool = False) -> None:
    """Raise StateError for a manager that is closed, or that restores although it `went_on` already."""
    if closed:
        raise StateError(
            "this manager is closed, or was made before this process was forked: open another one to go on"
        )
    if went_on:
        raise StateError(
            "a launch goes on from one checkpoint, and this one has restored or saved already: close the "
            "manager, and restore with a new one"
        )


def plain_step(step: Any) -> int:
    """A training step as a plain int. Raises StateError for what no checkpoint can be named after."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise StateError(f"a step is a whole number from 0 to {MAX_STEP}, not {str(step)[:50]}")
    return number


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics without tensors and NumPy scalars."""
    return {str(k): v.item() if hasattr(v, "item") else v for k, v in (metrics or {}).items()}
