"""What a save costs training beyond what the training thread sees: steps beside it take longer."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

# Steps without a save that the others are held against, and the fewest that say anything.
_WINDOW = 100
_ENOUGH = 8
# A step that took longer than so many usual ones did something else, too: an evaluation, a pause.
_AT_MOST = 2.0


class Slowdown:
    """Compares steps beside a save with the newest ones without. Constant time and memory a step.

    An estimate of what is hidden from a clock in the training thread: copying and writing take memory
    bandwidth and processor time from forward and backward. One step's value means little, and may be
    below 0; their sum over the saves is right on average, for slow steps count equally on both sides.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_WINDOW)
        self._usual: tuple[float, float] | None = None

    def step(self, seconds: float, beside_a_save: bool) -> float:
        """Take in a step; by how many seconds it was longer than usual, 0 for one without a save."""
        if not beside_a_save:
            self._quiet.append(seconds)
            self._usual = None
            return 0.0
        if len(self._quiet) < _ENOUGH:
            return 0.0
        if self._usual is None:
            limit = _AT_MOST * median(self._quiet)
            self._usual = limit, fmean(min(each, limit) for each in self._quiet)
        limit, usual = self._usual
        return min(seconds, limit) - usual
