"""Medians and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A median with its 90 % interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether nothing at all is among what the samples allow for."""
        return self.low <= 0.0 <= self.high


def bootstrap(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of `samples` with its bootstrap 90 % interval; the same samples give the same interval.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("an interval needs at least one sample")
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [5, 95])
    return Interval(float(np.median(values)), float(low), float(high))


def paired_overheads(
    controls: Sequence[float], saves: Sequence[tuple[float, int]], window: int
) -> list[float]:
    """Seconds that each save window lost against the control windows before and after it.

    `controls`: seconds of each control window of `window` steps, one more than there are `saves`; a save
    window is (seconds, steps), for it goes on until the save is durable. Raises ValueError if they can't
    be paired.
    """
    if len(controls) != len(saves) + 1:
        raise ValueError(f"{len(saves)} save windows need {len(saves) + 1} controls, not {len(controls)}")
    return [
        seconds - steps * (before + after) / (2 * window)
        for (seconds, steps), before, after in zip(saves, controls, controls[1:], strict=False)
    ]
