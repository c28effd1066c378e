"""Carries attempts from the training thread to storage: plans and stages in one thread, settles them
in another.

The training thread calls `prepare`, `begin` and `join`; everything else happens here in the
background. An attempt ends with a verdict that all ranks share: committed, or void with its first
cause.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ckpt import faults
from ckpt.attempts import Attempt
from ckpt.errors import CheckpointError, StateError, StorageError
from ckpt.flatten import Restructured, flatten
from ckpt.planning import Arenas, Plan, make_plan
from ckpt.settling import Settler
from ckpt.staging import Stage
from ckpt.team import Team
from ckpt.values import encode


class Saver:
    """The save machinery of one rank. `begin` and `prepare` are called from the training thread only."""

    def __init__(
        self,
        state: Mapping[str, Any],
        team: Team,
        settler: Settler,
        *,
        slots: int,
        timeout_s: float,
        say: Callable[[str], None],
        planned: Callable[[Plan], None],
    ) -> None:
        """`planned` is told of every new plan, in the background, before it is used."""
        self._state = state
        self._team = team
        self._settler = settler
        self._slots = slots
        self._timeout_s = timeout_s
        self._planned = planned
        self._arenas = Arenas(say)
        self._plan: Future[Plan] | None = None
        self._plans = 0
        self._current: Plan | None = None
        # Both are the training thread's: what its optimizer, and any other change, has to wait for.
        self._staging: list[Attempt] = []
        self._unstaged: list[Attempt] = []
        self._pointers_move = False
        self._slots_change = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckpt-stage", daemon=True)
        self._thread.start()

    @property
    def has_plan(self) -> bool:
        """Whether the state was flattened already."""
        return self._plan is not None

    def prepare(self) -> float:
        """Flatten the state as it is now, and plan in the background; on many ranks a collective.

        Returns the seconds that took the caller.

        No attempt may be in flight whose arena the new plan could replace: waits for those.
        """
        start = time.perf_counter()
        flat = flatten(self._state, self._team.rank)
        self._plans += 1
        number = self._plans
        future: Future[Plan] = Future()
        self._plan = future

        def job() -> None:
            try:
                plan = make_plan(number, flat, self._team.group, self._team.rank)
                self._planned(plan)
                for slot in range(self._slots):
                    self._settler.wait_free(slot, self._timeout_s)
                    self._make_stage(plan, slot)
                self._current = plan
            except BaseException as error:
                future.set_exception(error)
                return
            # A save may begin from here on: its copy comes behind this in the same thread.
            future.set_result(plan)
            with suppress(StorageError):  # which that copy would meet as well
                for slot in range(self._slots):
                    self._arenas.touch(slot)

        self._jobs.put(job)
        return time.perf_counter() - start

    def check(self) -> None:
        """Raise StateError or StorageError if planning has failed in the background."""
        if self._plan is not None and self._plan.done():
            self._result()

    def begin(
        self,
        name: str,
        step: int,
        slot: int,
        metrics: Mapping[str, Any],
        lead: Callable[[], dict[str, Any]] | None,
    ) -> Attempt:
        """Begin to save the state as it is now; returns once training may go on.

        `lead` makes what rank 0 adds to its part; it is called in the background. Raises StateError
        for a state that can't be stored, StorageError if planning failed; the attempt is void then.
        """
        start = time.perf_counter()
        attempt = Attempt(name, step, slot, metrics=dict(metrics), lead=lead)
        self._staging = [a for a in self._staging if not a.staged.is_set()]
        self._unstaged = [a for a in self._unstaged if not a.staged.is_set()]
        try:
            self._capture(attempt)
            self._settler.add(attempt)
            self._staging.append(attempt)
            self._unstaged.append(attempt)
            self._jobs.put(lambda: self._stage(attempt))
        except BaseException as error:
            # Ctrl-C, too: an attempt that was counted has to end, and nobody may wait for it for ever.
            attempt.go_wrong("failed", str(error) or type(error).__name__)
            self._settler.add(attempt)
            self._settler.follow(attempt)
            self._settler.staged(attempt)
            raise
        attempt.stall_s = time.perf_counter() - start
        return attempt

    def _capture(self, attempt: Attempt) -> None:
        plan, now = self._current_plan(attempt)
        if plan is None:
            return
        values = {entry: encode(value, entry) for entry, value in now.values.items()}
        attempt.taken = plan.stages[attempt.slot].copy_at_call(now.tensors)
        attempt.plan = plan
        attempt.bytes = plan.layout.size
        attempt.part = {
            "rank": self._team.rank,
            "world_size": self._team.world_size,
            "attempt": attempt.name,
            "step": attempt.step,
            "aliases": plan.flat.aliases,
            "values": plan.static | values,
            "lead": None,
        }

    def join(self) -> float:
        """Return when the optimizer may move; the seconds that took."""
        if not self._staging:
            return 0.0
        start = time.perf_counter()
        for attempt in self._staging:
            attempt.movable.wait()
            plan = attempt.plan  # gone once the attempt has ended, when there is nothing left to wait for
            if plan is not None and (stage := plan.stages.get(attempt.slot)) is not None:
                stage.join_device()
        spent = time.perf_counter() - start
        for attempt in self._staging:
            attempt.join_s += spent
        self._staging = []
        return spent

    def wait_staged(self) -> None:
        """Return when nothing reads the live state any more."""
        if self._unstaged:
            self.join()
            for attempt in self._unstaged:
                attempt.staged.wait()
            self._unstaged = []

    def close(self) -> None:
        """End the staging thread and give the arenas back; nothing may be in flight."""
        self._jobs.put(None)
        self._thread.join(self._timeout_s)
        self._plan = self._current = None
        self._arenas.close()

    def restore_arenas(self) -> None:
        """Give the arenas to a writer that has taken another one's place."""
        for slot in range(self._slots):
            arena = self._arenas.get(slot)
            if arena is not None:
                self._settler.writer.attach(arena, slot)

    def _current_plan(self, attempt: Attempt) -> tuple[Plan | None, Any]:
        """The plan of the state as it is now, and what was collected by it; None if the ranks have to
        plan first.
        """
        for _ in range(3):
            if self._plan is None:
                self.prepare()
            plan = self._result()
            stage, flat = plan.stages[attempt.slot], plan.flat
            # Looked at in the background as a rule; a state that changes there is looked at here
            # from then on.
            same = flat.quick.same() and (not self._slots_change or flat.thorough.same())
            moved = self._pointers_move or stage.seems_moved()
            with suppress(Restructured):
                if same and (not moved or stage.refresh()) and flat.fits(now := flat.collect()):
                    return plan, now
            if self._team.group is not None:
                # Planning is a collective: it has to be agreed on first.
                attempt.go_wrong("replan", "the structure of the state has changed")
                return None, None
            self._plan = None
        raise StateError(
            "the structure of the state changes whenever it is looked at: its state_dict makes new shapes"
        )

    def _result(self) -> Plan:
        assert self._plan is not None
        try:
            return self._plan.result(self._timeout_s)
        except CheckpointError:
            self._plan = None
            raise
        except Exception as error:
            self._plan = None
            raise StorageError(f"planning the save failed: {error}") from error

    def _make_stage(self, plan: Plan, slot: int) -> None:
        on_cuda = any(piece.source.is_cuda for piece in plan.pieces)
        if self._current is not None:
            self._current.stages.pop(slot, None)  # its views would keep an outgrown arena's memory
        arena, new = self._arenas.fit(slot, plan.layout.size, on_cuda)
        if new:
            self._settler.writer.attach(arena, slot)
        plan.stages[slot] = Stage(plan.flat, plan.pieces, plan.layout, arena)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _stage(self, attempt: Attempt) -> None:
        start = time.perf_counter()
        self._settler.follow(attempt)
        try:
            if attempt.plan is not None and attempt.problem is None:
                self._copy(attempt, attempt.plan)
        except Exception as error:
            attempt.go_wrong("failed", f"step {attempt.step} could not be staged: {error}")
        finally:
            attempt.stage_s = time.perf_counter() - start
            self._settler.staged(attempt)

    def _copy(self, attempt: Attempt, plan: Plan) -> None:
        stage, writer = plan.stages[attempt.slot], self._settler.writer
        taken = attempt.taken
        assert taken is not None
        if key := stage.moved():
            self._pointers_move = True
            attempt.go_wrong("changed", f"{key} moved to other memory before it was copied")
            return
        self._arenas.touch(attempt.slot)
        begun = time.perf_counter()
        writer.begin(attempt.name, plan.layout, not stage.announced, attempt.slot, plan.tensors)
        stage.announced = True

        def movable() -> None:
            self._pointers_move = self._pointers_move or stage.moved() is not None
            if not plan.flat.thorough.same():
                self._slots_change = True
                attempt.go_wrong("replan", "modules or optimizer slots were replaced")
            elif complaint := stage.live_complaint(taken):
                attempt.go_wrong("changed", complaint)
            attempt.movable.set()

        try:
            stage.copy_rest(taken, lambda nbytes: writer.progress(nbytes, attempt.slot), movable)
        except StateError:
            self._pointers_move = True  # memory was freed meanwhile: it is looked up anew from now on
            raise
        if attempt.problem is None and (complaint := stage.copy_complaint(taken)):
            attempt.go_wrong("changed", complaint)
        attempt.stage_s = time.perf_counter() - begun
        if attempt.problem is None:
            faults.point("seal", attempt.name)
            if attempt.lead is not None:
                attempt.part["lead"] = attempt.lead() | {
                    "created": attempt.created,
                    "metrics": attempt.metrics,
                    "costs": attempt.early_costs(),
                }
            writer.seal(self._settler.identity | attempt.part)
