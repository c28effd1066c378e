"""Learning rate schedules: functions of the number of updates done, without any state of their own.

Each returns the factor that the configured learning rate is multiplied by for the next update. Having no
state, a schedule cannot be off by one after a resume, and a changed configuration simply acts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """The configured learning rate throughout."""
    return lambda _: 1.0


def warmup_cosine(max_steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Linear from nearly 0 over ``warmup`` steps, then half a cosine down to ``floor`` at ``max_steps``."""
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"schedule.floor={floor} is a fraction of the learning rate: give 0 to 1")
    if warmup < 0 or max_steps < 1:
        raise ValueError(f"schedule needs max_steps >= 1 and warmup >= 0, not {max_steps} and {warmup}")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def multistep(milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Multiplied by ``gamma`` from each milestone (in steps) on."""
    ordered = sorted(milestones)
    return lambda step: gamma ** bisect_right(ordered, step)
