"""Rank 0's decision at every step boundary: save, stop, or give up."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from ckpt.overhead import Slowdown
from ckpt.policies import Now, SavePolicy
from ckpt.settling import Settler
from ckpt.stats import SaveCosts, SaveStats, Tally
from ckpt.team import Decision, Team

# What a save costs is the median of so many: one that met a bad moment is no reason to save less often.
_LAST = 5


class _Cost(NamedTuple):
    """Seconds that a save held the training thread, and by how much it slowed the steps beside it."""

    held: float
    slowed: float


class Decider:
    """Asks the policy. On many ranks a decision is made one step before it is carried out."""

    def __init__(
        self,
        policy: SavePolicy,
        team: Team,
        settler: Settler,
        tally: Tally,
        *,
        slots: int,
        when_busy: str,
        max_failed: int,
        skipped: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`skipped` is told the step of each save that was due while all slots were in use."""
        self._policy = policy
        self._team = team
        self._settler = settler
        self._tally = tally
        self._slots = slots
        self._when_busy = when_busy
        self._max_failed = max_failed
        self._skipped = skipped
        self._clock = clock
        self._last_began = clock()
        self._asked = 0
        # The number of the question that was answered with a save that has not begun yet.
        self._promise: int | None = None
        self._slowdown = Slowdown()
        self._stepped_at: float | None = None
        self._warm = False
        self._held_s = 0.0
        self._busy = False
        self._at_begin: SaveStats | None = None
        self._costs: deque[_Cost] = deque(maxlen=_LAST)

    def began(self) -> None:
        """A save began, by decision or by hand."""
        if (cost := self._newest_cost()) is not None:
            self._costs.append(cost)
        self._at_begin = self._tally.now
        self._last_began = self._clock()
        self._promise = None
        self._busy = True

    def decide(self, step: int, previous: int | None) -> Decision:
        """What all ranks do at `step`, which follows `previous`."""
        self._measure()
        self._asked += 1
        stop = self._team.stop_asked()
        if self._settler.fenced:
            return Decision(error=("Fenced", self._settler.fenced), stop=stop)
        if self._settler.bad_in_a_row >= self._max_failed:
            return Decision(error=(self._settler.kind_of_failure, self.complaint()), stop=stop)
        free = not self._promised and self._settler.free_slot(self._slots) is not None
        if not (self._settler.retry and free) and not self._policy.should_save(self._now(step, previous)):
            return Decision(stop=stop)
        if not free and self._when_busy == "skip":
            self._tally.add(skipped=1)
            self._skipped(step)
            return Decision(stop=stop)
        self._promise = self._asked
        self._settler.retry = False
        return Decision(token=secrets.token_hex(4), replan=self._settler.take_replan(), stop=stop)

    @property
    def _promised(self) -> bool:
        # One of several ranks asks for the next call before it carries out this one's. A promise that is
        # older was broken by an error, and must not keep others from being made.
        oldest = self._asked - (1 if self._team.world_size > 1 else 0)
        return self._promise is not None and self._promise >= oldest

    def complaint(self) -> str:
        """Why saving is given up."""
        return (
            f"{self._settler.bad_in_a_row} saves in a row could not be committed; the last: "
            f"{self._settler.last_failure}. Earlier checkpoints are untouched"
        )

    def _measure(self) -> None:
        """Take in the time since the last decision: one training step."""
        now, held = self._clock(), self._tally.held_s
        if self._stepped_at is None:
            self._stepped_at = now
        elif not self._warm:
            # The first one is no usual step: it planned, or lies between two decisions of one call.
            self._warm = True
            self._tally.add(trained_s=now - self._stepped_at)
        else:
            took = now - self._stepped_at
            slowed = self._slowdown.step(took - (held - self._held_s), self._busy)
            self._tally.add(trained_s=took, slowed_s=slowed)
        self._stepped_at, self._held_s = now, held
        self._busy = bool(self._settler.in_flight())

    def _newest_cost(self) -> _Cost | None:
        """What was lost since the last save began; None if nothing has been committed since."""
        then = self._at_begin
        if then is None or self._tally.get("committed") == then.committed:
            return None
        now = self._tally.now
        return _Cost(now.held_s - then.held_s, now.slowed_s - then.slowed_s)

    def _cost_s(self) -> float | None:
        newest = self._newest_cost()
        costs = [*self._costs, *([newest] if newest is not None else [])][-_LAST:]
        if not costs:
            return None
        slowed = median(cost.slowed for cost in costs)
        return median(cost.held for cost in costs) + max(0.0, slowed)

    def _now(self, step: int, previous: int | None) -> Now:
        get = self._tally.get
        last: SaveCosts | None = get("last")
        return Now(
            step=step,
            previous_step=previous,
            since_last_s=self._clock() - self._last_began,
            in_flight=self._promised or bool(self._settler.in_flight()),
            cost_s=self._cost_s(),
            durable_s=last.durable_s if last else None,
            spent_s=self._tally.held_s + max(0.0, get("slowed_s")),
            trained_s=get("trained_s"),
            failed=self._settler.bad_in_a_row > 0,
        )
