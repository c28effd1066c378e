"""Rank 0's decision at every step boundary: save, stop, or give up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from ckpt.policies import Now, SavePolicy
from ckpt.settling import Settler
from ckpt.stats import Tally
from ckpt.team import Decision, Team


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
        self._last_began = time.monotonic()
        self._promised = False

    def began(self) -> None:
        """A save began, by decision or by hand."""
        self._last_began = time.monotonic()
        self._promised = False

    def decide(self, step: int, previous: int | None) -> Decision:
        """What all ranks do at `step`, which follows `previous`."""
        stop = self._team.stop_asked()
        if self._settler.fenced:
            return Decision(error=("Fenced", self._settler.fenced), stop=stop)
        if self._settler.bad_in_a_row >= self._max_failed:
            return Decision(error=("StorageError", self.complaint()), stop=stop)
        free = not self._promised and self._settler.free_slot(self._slots) is not None
        if not (self._settler.retry and free) and not self._policy.should_save(self._now(step, previous)):
            return Decision(stop=stop)
        if not free and self._when_busy == "skip":
            self._tally.add(skipped=1)
            self._skipped(step)
            return Decision(stop=stop)
        self._promised = True
        self._settler.retry = False
        return Decision(token=secrets.token_hex(4), replan=self._settler.take_replan(), stop=stop)

    def complaint(self) -> str:
        """Why saving is given up."""
        return (
            f"{self._settler.bad_in_a_row} saves in a row could not be committed; the last: "
            f"{self._settler.last_failure}. Earlier checkpoints are untouched"
        )

    def _now(self, step: int, previous: int | None) -> Now:
        last = self._tally.now.last
        return Now(
            step=step,
            previous_step=previous,
            since_last_s=time.monotonic() - self._last_began,
            in_flight=self._promised or bool(self._settler.in_flight()),
            cost_s=last.stall_s + last.join_s + last.stage_s if last else None,
            durable_s=last.durable_s if last else None,
        )
