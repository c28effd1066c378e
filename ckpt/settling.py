"""Follows attempts from the writer's reports to the verdict, in a background thread; on rank 0 also
commits and prunes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ckpt.attempts import Attempt
from ckpt.errors import StorageError
from ckpt.stats import Tally
from ckpt.team import OK, Team
from ckpt.writer.client import WriterClient
from ckpt.writer.events import Committed, Durable, Event, Exited, Failed, FencedOff, Notice, Pruned

COMMITTED = "committed"
_POLL_S = 0.01
_LONG_POLL_S = 0.1
_IDLE_S = 0.5
_PATIENCE = 3
_RESTART_S = 5.0
_ADVICE = "call step() after the last change to the state, or wait_staged() before the next one"


class Settler:
    """The writer process of this rank and the attempts in flight there. Methods may be called from any
    thread.
    """

    def __init__(
        self,
        team: Team,
        start_writer: Callable[[], WriterClient],
        identity: dict[str, Any],
        tally: Tally,
        *,
        rank_timeout_s: float,
        tell: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        committed: Callable[[Attempt], list[str]],
        restarted: Callable[[], None],
        step_now: Callable[[], int],
    ) -> None:
        """`committed` is told of each commit and returns the attempts to prune; `restarted` that a new
        writer runs.
        """
        self.identity = identity
        self.writer = start_writer()
        self.fenced: str | None = None
        self.last_failure = ""
        self.bad_in_a_row = 0
        self._storage_failed = False
        self.retry = False
        self._replan = False
        self.last_committed_step: int | None = None
        self._team = team
        self._start_writer = start_writer
        self._tally = tally
        self._rank_timeout_s = rank_timeout_s
        self._tell = tell
        self._say = say
        self._on_commit = committed
        self._on_restart = restarted
        self._step_now = step_now
        self._no_restart_before = 0.0
        self._beaten, self._beaten_at = -1, 0.0
        self._attempts: list[Attempt] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="ckpt-settle", daemon=True)
        self._thread.start()

    def add(self, attempt: Attempt) -> None:
        """Count an attempt as in flight, once; wakes nobody, for training waits for this."""
        with self._changed:
            if attempt in self._attempts:
                return
            self._attempts.append(attempt)
        self._tally.add(begun=1, backlog=1)

    def follow(self, attempt: Attempt) -> None:
        """Say that an attempt has begun."""
        self._tell({"state": "begun", "step": attempt.step, "attempt": attempt.name, "bytes": attempt.bytes})

    def staged(self, attempt: Attempt) -> None:
        """Nothing reads the live state for this attempt any more, and its optimizer may move."""
        attempt.movable.set()
        attempt.staged.set()
        # After the mark, as the settling thread looks for the mark after the problem: one of them sees both.
        if attempt.problem is not None:
            self.writer.nudge()

    def take_replan(self) -> bool:
        """Whether the last verdicts ask for the state's structure to be looked at anew; asks once."""
        wanted, self._replan = self._replan, False
        return wanted

    @property
    def kind_of_failure(self) -> str:
        """The class in `ckpt.errors` for the saves that went wrong in a row."""
        return "StorageError" if self._storage_failed else "StateError"

    def in_flight(self) -> list[Attempt]:
        """The attempts that have not ended."""
        with self._changed:
            return list(self._attempts)

    def free_slot(self, slots: int) -> int | None:
        """A slot without an attempt, or None."""
        taken = {attempt.slot for attempt in self.in_flight()}
        return next((slot for slot in range(slots) if slot not in taken), None)

    def wait_free(self, slot: int, timeout_s: float | None) -> None:
        """Return when a slot has no attempt. Raises StorageError after `timeout_s`."""
        self._wait(lambda: all(attempt.slot != slot for attempt in self._attempts), timeout_s)

    def wait_any(self, slots: int, timeout_s: float | None) -> int:
        """A slot without an attempt, once there is one. Raises StorageError after `timeout_s`."""
        self._wait(lambda: len(self._attempts) < slots, timeout_s)
        found = self.free_slot(slots)
        assert found is not None
        return found

    def drain(self, timeout_s: float | None) -> bool:
        """Return when nothing is in flight; False if that takes longer than `timeout_s`."""
        self.writer.hurry()
        with self._changed:
            return self._changed.wait_for(lambda: not self._attempts, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread and the writer process, which finishes by itself what is sealed."""
        self._closing = True
        self.writer.nudge()
        self._thread.join(timeout_s)
        self.writer.close(timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(ready, timeout_s):
                raise StorageError(
                    f"no earlier save has ended within {timeout_s:g} s: is the storage hanging?"
                )

    def _work(self) -> None:
        while not self._closing:
            try:
                event = self.writer.next_event(self._patience())
                while event is not None:
                    self._hear(event)
                    event = self.writer.next_event(0)
                if not self.writer.alive:
                    self._restart_writer()
                for attempt in self.in_flight():
                    self._advance(attempt)
                self._beat()
            except Exception as error:
                for attempt in self.in_flight():
                    attempt.go_wrong("failed", str(error))
                    self.writer.abort(str(error), attempt.name)
                    self._end(attempt, f"failed: {error}")

    def _patience(self) -> float:
        """How long to wait for the writer's next event: other ranks don't wake this thread."""
        if self._team.world_size == 1 or not self._attempts:
            return _IDLE_S
        return _POLL_S if any(attempt.reported for attempt in self._attempts) else _LONG_POLL_S

    def _hear(self, event: Event) -> None:
        named = next((a for a in self._attempts if a.name == getattr(event, "attempt", None)), None)
        if isinstance(event, Notice):
            self._say(event.text)
        elif isinstance(event, Pruned):
            for warning in event.warnings:
                self._say(f"pruning: {warning}")
        elif isinstance(event, Exited):
            for attempt in self.in_flight():
                attempt.go_wrong("failed", f"the writer process ended: {event.reason}")
        elif named is None:
            return
        elif isinstance(event, Durable):
            named.durable_at, named.persist_s, named.bytes = event.t, event.persist_s, event.bytes
            self._tell({"state": "durable", **self._numbers(named)})
        elif isinstance(event, Committed):
            named.committed_at = event.t
        elif isinstance(event, Failed):
            named.go_wrong("failed", event.error)
        elif isinstance(event, FencedOff):
            self.fenced = event.by
            named.go_wrong("failed", event.by)

    def _restart_writer(self) -> None:
        if self._closing or time.monotonic() < self._no_restart_before:
            return
        self._no_restart_before = time.monotonic() + _RESTART_S
        self._say("the writer process has ended: starting another one")
        self.writer = self._start_writer()
        self._on_restart()

    def _advance(self, attempt: Attempt) -> None:
        ended = attempt.problem is not None and attempt.staged.is_set()
        if not attempt.reported and (ended or attempt.durable_at is not None):
            attempt.reported = True
            attempt.reported_at = time.monotonic()
            self._team.report(attempt.name, attempt.problem or OK)
        if self._team.rank == 0 and attempt.verdict_at is None:
            self._lead(attempt)
        verdict = (
            self._team.verdict(attempt.name) if attempt.verdict_at is None or not attempt.released else None
        )
        if verdict is not None and attempt.staged.is_set() and not attempt.released:
            attempt.verdict_at = attempt.verdict_at or time.monotonic()
            attempt.released = True
            if verdict != COMMITTED:
                self.writer.abort(verdict, attempt.name)
            attempt.committed = verdict == COMMITTED
            self._team.release(attempt.name)
            if self._team.rank != 0:
                self._end(attempt, verdict)
                return
            attempt.problem = None if attempt.committed else verdict
        elif attempt.reported and time.monotonic() - attempt.reported_at > _PATIENCE * self._rank_timeout_s:
            self._end(
                attempt,
                f"failed: rank 0 has not said how it ended for {_PATIENCE * self._rank_timeout_s:g} s",
            )
        if self._team.rank == 0 and attempt.released:
            late = time.monotonic() - (attempt.verdict_at or 0.0) > self._rank_timeout_s
            if late or self._team.released(attempt.name):
                self._end(attempt, COMMITTED if attempt.committed else attempt.problem or "failed")

    def _lead(self, attempt: Attempt) -> None:
        """Rank 0: commit once all ranks are durable; decide the verdict."""
        reports = self._team.reports(attempt.name)
        bad = {rank: text for rank, text in reports.items() if text != OK}
        if attempt.problem is not None and attempt.reported:
            bad.setdefault(0, attempt.problem)
        verdict = None
        if attempt.committed_at is not None:
            verdict = COMMITTED
        elif bad:
            rank, text = min(bad.items())
            kind, _, cause = text.partition(": ")
            verdict = text if self._team.world_size == 1 else f"{kind}: rank {rank}: {cause}"
        elif len(reports) == self._team.world_size:
            if not attempt.commit_sent:
                attempt.commit_sent = True
                self.writer.commit(attempt.name, self._team.world_size)
        elif attempt.durable_at and time.monotonic() - attempt.durable_at > self._rank_timeout_s:
            missing = sorted(set(range(self._team.world_size)) - reports.keys())
            late = f"{', '.join(map(str, missing))} was not done {self._rank_timeout_s:g} s after rank 0"
            verdict = f"failed: rank {late}"
        if verdict is not None:
            attempt.verdict_at = time.monotonic()
            self._team.publish_verdict(attempt.name, verdict)

    def _end(self, attempt: Attempt, verdict: str) -> None:
        kind, _, cause = verdict.partition(": ")
        if kind == COMMITTED:
            attempt.committed_at = attempt.committed_at or time.monotonic()
            self.bad_in_a_row = 0
            self.last_committed_step = attempt.step
            doomed = self._on_commit(attempt)
            if doomed:
                self.writer.prune(doomed)
        else:
            # What could not be written waits for the policy; what only came at a bad moment is tried again.
            self.retry = self.retry or kind != "failed"
            self._replan = self._replan or kind == "replan"
            if kind != "replan":
                self._storage_failed = kind == "failed" or (self._storage_failed and self.bad_in_a_row > 0)
                self.bad_in_a_row += 1
                ended = "failed" if kind == "failed" else f"was given up ({_ADVICE})"
                self.last_failure = f"the save of step {attempt.step} {ended}: {cause}"
        with self._changed:
            self._attempts = [a for a in self._attempts if a is not attempt]
            # Not before the slot is free: who sees no backlog may begin a save.
            if kind == COMMITTED:
                self._tally.committed(attempt.costs())
            else:
                self._tally.add(backlog=-1, **{"failed" if kind == "failed" else "voided": 1})
            attempt.plan = None
            attempt.part = {}
            attempt.done.set()
            self._changed.notify_all()
        if kind == COMMITTED:
            self._tell({"state": "committed", **self._numbers(attempt)})
        else:
            self._tell({"state": "failed", "error": cause, **self._numbers(attempt)})

    def _numbers(self, attempt: Attempt) -> dict[str, Any]:
        return asdict(attempt.costs())

    def _beat(self) -> None:
        step, now = self._step_now(), time.monotonic()
        if self._team.rank == 0 and step != self._beaten and now - self._beaten_at > _IDLE_S:
            self._beaten, self._beaten_at = step, now
            with contextlib.suppress(StorageError):
                self.writer.beat_phase(step)
