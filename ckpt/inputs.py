"""What a manager's caller hands in, checked and made plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.errors import StateError


def check_options(max_failed_saves: int, when_busy: str, slots: int, rank_timeout_s: float) -> None:
    """Raise StateError for options of a manager that make no sense."""
    if when_busy not in ("skip", "wait"):
        raise StateError(f"when_busy must be 'skip' or 'wait', not {when_busy!r}")
    for name, value in (("max_failed_saves", max_failed_saves), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StateError(f"{name} must be a whole number from 1 on, not {value!r}")
    if not rank_timeout_s > 0:
        raise StateError(f"rank_timeout_s must be above 0 seconds, not {rank_timeout_s!r}")


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics without tensors and NumPy scalars."""
    return {str(k): v.item() if hasattr(v, "item") else v for k, v in (metrics or {}).items()}
