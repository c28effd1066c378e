"""The checkpoint manager: what a training loop talks to."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt import capacity, environment, hooks
from ckpt.attempts import Attempt
from ckpt.checkpoint import Checkpoint
from ckpt.coordinate import Decision, Group, Solo, Team
from ckpt.errors import CheckpointError, Fenced, StateError, StorageError
from ckpt.history import History
from ckpt.launches import Launch, begin_launch, record_end, record_parent
from ckpt.planning import Plan
from ckpt.policies import EverySteps, KeepLast, KeepPolicy, Now, SavePolicy
from ckpt.run import Run, open_run
from ckpt.saver import Saver
from ckpt.settling import Settler
from ckpt.stats import SaveStats, Tally
from ckpt.writer.client import WriterClient
from ckpt.writer.options import WriterOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("ckpt")


class CheckpointManager:
    """Saves a training state without holding the training up, and restores it.

    All methods are called from the training thread, but `request_stop`, which may be called from anywhere. With a
    process group every rank makes a manager and makes the same calls.
    """

    def __init__(
        self,
        run: Run | str,
        state: Mapping[str, Any],
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        process_group: ProcessGroup | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        max_failed_saves: int = 3,
        when_busy: str = "skip",
        slots: int = 1,
        digest: str = "xxh3-128",
        threads: int = 2,
        bandwidth_limit: float | None = None,
        posthumous_s: float = 120.0,
        rank_timeout_s: float = 600.0,
        say: Callable[[str], None] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Begin a launch of the run and start this rank's writer process.

        `state` maps entry names to modules, optimizers, objects with `state_dict`/`load_state_dict`, or plain values.
        `when_busy` says what a save does that is due while every slot is in use: "skip" or "wait".
        `rank_timeout_s` bounds every wait for another rank. `on_event` gets a dict per change of a save, from
        background threads too; `say` gets lines for people.

        Raises RunBusy, StateError, StorageError; on one rank what went wrong on rank 0.
        """
        _check_options(max_failed_saves, when_busy, slots, rank_timeout_s)
        options = WriterOptions(
            digest=digest, threads=threads, bandwidth_limit=bandwidth_limit, posthumous_s=posthumous_s
        )
        self.run = run if isinstance(run, Run) else open_run(run)
        self._state = state
        self._policy: SavePolicy = save if save is not None else EverySteps(50)
        self._keep: KeepPolicy = keep if keep is not None else KeepLast(3)
        self._max_failed = max_failed_saves
        self._when_busy = when_busy
        self._slots = slots
        self._rank_timeout_s = rank_timeout_s
        self._say = say or _log.warning
        self._on_event = on_event or (lambda event: None)
        self._tally = Tally()
        self._team: Team = Group(process_group, rank_timeout_s) if process_group is not None else Solo()
        self.launch = self._begin_launch(config, overrides)
        self._config = config
        self.parent: Checkpoint | None = None
        self._parent_recorded = False
        self._history = History(self.run, self.launch.number, self._keep, self._say)
        self._step = self._previous = None  # type: int | None
        self._calls = self._shared = 0
        self._stop = False
        self._last_began = time.monotonic()
        self._token: str | None = None
        self._ended = False
        self._closed = False
        self._warn_of_capacity(capacity.estimate(dict(state)))
        self._settler = Settler(
            self._team,
            lambda: WriterClient.start(self.run.uri, self._team.rank, self.launch.number, options=options),
            {"run_id": self.run.id, "launch": self.launch.number},
            self._tally,
            rank_timeout_s=rank_timeout_s,
            tell=self._tell,
            say=self._say,
            committed=self._committed,
            restarted=lambda: self._saver.restore_arenas(),
            step_now=lambda: self._step or 0,
        )
        self._saver = Saver(
            state,
            self._team,
            self._settler,
            slots=slots,
            timeout_s=rank_timeout_s,
            say=self._say,
            planned=self._on_plan,
        )
        self._unhook = hooks.before_any_optimizer_step(self._join)

    @property
    def rank(self) -> int:
        """This process's rank in the process group."""
        return self._team.rank

    @property
    def stats(self) -> SaveStats:
        """What saving has cost so far, on this rank."""
        return self._tally.now

    @property
    def last_committed(self) -> Checkpoint | None:
        """The newest checkpoint committed by this launch, None before the first."""
        return self._history.last

    def restore(self, which: str = "latest", partial: bool = False) -> Checkpoint | None:
        """Restore into the live state; None only for a run without any checkpoint.

        `which`: "latest", "step:N", an attempt's name, "best:METRIC:min|max", or "fresh", which refuses unless the
        run is empty. Raises what `ckpt.restore.restore_into` raises; nothing live is touched then.
        """
        from ckpt.restore import restore_into

        self.wait_staged()
        found = restore_into(
            self.run,
            self._state,
            rank=self._team.rank,
            process_group=self._team.group,
            which=which,
            say=self._say,
            partial=partial,
        )
        self.parent = found
        self._record_parent()
        if found is not None:
            self._step = self._previous = found.step
            self._settler.last_committed_step = found.step
            self._saver.prepare()
        return found

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Say that training step `step` is done; saves if that is due. True if a save began.

        Raises what made saving fail `max_failed_saves` times in a row, Fenced if a newer launch took the run over,
        StateError for a state that can't be stored.
        """
        self._previous, self._step = self._step, step
        if not self._saver.has_plan:
            self._saver.prepare()
        call, self._calls = self._calls, self._calls + 1
        decision = self._team.decide(
            call, lambda: self._decide(step), lambda: self._decide(self._next_step())
        )
        self._stop = self._stop or decision.stop
        if decision.error:
            raise self._error(decision.error)
        if decision.token is None:
            return False
        if decision.replan:
            self._saver.prepare()
        slot = self._settler.free_slot(self._slots)
        if slot is None:
            slot = self._settler.wait_any(self._slots, self._rank_timeout_s)
        self._begin(step, decision.token, slot, metrics)
        return True

    def save(self, step: int, metrics: Mapping[str, Any] | None = None, wait: bool = False) -> None:
        """Save now, whatever the policy says; waits for a free slot. With `wait`, returns when it is committed.

        Raises StorageError if it could not be committed (with `wait`), StateError for a state that can't be stored.
        """
        self._step = step
        self._shared += 1
        token = self._team.share(f"save/{self._shared}", lambda: secrets.token_hex(4))
        slot = self._settler.wait_any(self._slots, self._rank_timeout_s)
        if self._settler.replan:
            self._settler.replan = False
            self._saver.prepare()
        attempt = self._begin(step, token, slot, metrics)
        if wait:
            self._wait_for(attempt)

    def wait_staged(self) -> None:
        """Return when the state may be changed outside `optimizer.step`."""
        self._saver.wait_staged()

    def request_stop(self) -> None:
        """Ask all ranks to stop at a step they agree on. Safe in a signal handler."""
        self._team.ask_stop()

    def stop_agreed(self, step: int) -> bool:
        """Whether all ranks stop after step `step`, the last one given to `step()`."""
        if self._team.world_size == 1:
            return self._team.stop_asked()
        return self._stop

    def drain(self, timeout: float | None = None) -> None:
        """Return when nothing is in flight. Raises StorageError after `timeout` seconds, or for what failed."""
        if not self._settler.drain(timeout):
            raise StorageError(
                f"a save was still being written after {timeout:g} s: the writer process goes on alone"
            )
        self._raise_failures(1)

    def close(self, final_step: int | None = None, save: bool = True, timeout: float | None = None) -> None:
        """Commit the last step if it is not yet, end the background work and the writer.

        `final_step` defaults to the last step given to `step()`; `save=False` saves nothing more. Raises StorageError
        if the last step could not be committed.
        """
        if self._closed:
            return
        deadline = self._rank_timeout_s if timeout is None else timeout
        try:
            if save:
                self._save_last(self._step if final_step is None else final_step, deadline)
        finally:
            self._closed = True
            self._unhook()
            self._settler.drain(deadline if save else 0)
            self._saver.close()
            self._settler.close(deadline)
            self._team.close()

    def finish(self, outcome: str, cause: str | None = None) -> None:
        """Record how the launch ended: "finished", "preempted" or "failed". Counts on rank 0, once."""
        if self._team.rank == 0 and not self._ended:
            self._ended = True
            record_end(self.run, self.launch, outcome, cause, self._step)

    def _save_last(self, step: int | None, timeout: float) -> None:
        self._settler.drain(timeout)
        if step is None or self._settler.last_committed_step == step:
            return
        for last_try in (False, True):
            try:
                self.save(step, wait=True)
                return
            except StorageError as error:
                # A state that moved while it was copied is no reason to lose the end of a run.
                if last_try or self._settler.fenced:
                    raise StorageError(f"the last step, {step}, could not be committed: {error}") from error

    def _wait_for(self, attempt: Attempt) -> None:
        self._settler.writer.hurry()
        while not attempt.done.wait(1.0):
            pass
        if self._settler.fenced:
            raise Fenced(self._settler.fenced)
        if not attempt.committed:
            raise StorageError(
                self._settler.failures[-1] if self._settler.failures else "the save was given up"
            )

    def _begin(self, step: int, token: str, slot: int, metrics: Mapping[str, Any] | None) -> Attempt:
        self._last_began = time.monotonic()
        self._token = None
        self._settler.retry = False
        name = f"step-{step:09d}-{self.launch.number:05d}-{token}"
        lead = self._lead() if self._team.rank == 0 else None
        attempt = self._saver.begin(name, step, slot, _plain(metrics), lead)
        self._tally.add(stall_s=attempt.stall_s)
        return attempt

    def _decide(self, step: int) -> Decision:
        """Rank 0: what happens at `step`."""
        stop = self._team.stop_asked()
        error = self._settler.fenced or self._failed_too_often()
        if error:
            return Decision(error=error, stop=stop)
        stats, flight = self._tally.now, bool(self._settler.in_flight()) or self._token is not None
        last = stats.last
        now = Now(
            step=step,
            previous_step=self._previous if step == self._step else self._step,
            since_last_s=time.monotonic() - self._last_began,
            in_flight=flight,
            cost_s=last.stall_s + last.join_s + last.stage_s if last else None,
            durable_s=last.durable_s if last else None,
        )
        free = self._settler.free_slot(self._slots) is not None and self._token is None
        retry = self._settler.retry and free
        if not (retry or self._policy.should_save(now)):
            return Decision(stop=stop)
        if not free and self._when_busy == "skip":
            self._tally.add(skipped=1)
            self._tell({"state": "skipped", "step": step})
            return Decision(stop=stop)
        replan, self._settler.replan = self._settler.replan, False
        self._token = secrets.token_hex(4)
        return Decision(token=self._token, replan=replan and self._team.group is not None, stop=stop)

    def _next_step(self) -> int:
        assert self._step is not None
        return self._step + (self._step - self._previous if self._previous is not None else 1)

    def _failed_too_often(self) -> str | None:
        if self._settler.bad_in_a_row < self._max_failed:
            return None
        return (
            f"{self._settler.bad_in_a_row} saves in a row could not be committed; the last: "
            f"{self._settler.failures[-1]}. Earlier checkpoints are untouched"
        )

    def _raise_failures(self, at_least: int) -> None:
        if self._settler.fenced:
            raise Fenced(self._settler.fenced)
        if self._settler.bad_in_a_row >= at_least:
            raise StorageError(self._settler.failures[-1])

    def _error(self, text: str) -> CheckpointError:
        return Fenced(text) if self._settler.fenced else StorageError(text)

    def _join(self) -> None:
        spent = self._saver.join()
        if spent:
            self._tally.add(join_s=spent)

    def _lead(self) -> dict[str, Any]:
        if not self._parent_recorded:
            self._record_parent()
        parent = self.parent
        return {
            "parent": {"attempt": parent.attempt, "step": parent.step, "launch": parent.launch}
            if parent
            else None,
            "config": self._config,
            "versions": environment.versions(),
            "environment": environment.environment() | {"world_size": self._team.world_size},
        }

    def _record_parent(self) -> None:
        self._parent_recorded = True
        if self._team.rank == 0:
            record_parent(self.run, self.launch, self.parent)

    def _begin_launch(self, config: Mapping[str, Any] | None, overrides: Sequence[str]) -> Launch:
        """Rank 0 begins it; the others learn its number, or why there is none."""
        owner = os.environ.get("CKPT_LAUNCH_OWNER", "")
        begun: list[Launch] = []

        def begin() -> dict[str, Any]:
            try:
                begun.append(
                    begin_launch(
                        self.run, owner=owner, config=config, overrides=list(overrides), say=self._say
                    )
                )
            except CheckpointError as error:
                begun_error.append(error)
                return {"error": str(error), "kind": type(error).__name__}
            return {"number": begun[0].number}

        begun_error: list[CheckpointError] = []
        told = self._team.share("launch", begin)
        if begun_error:
            raise begun_error[0]
        if "error" in told:
            raise _named(told["kind"])(f"rank 0: {told['error']}")
        return begun[0] if begun else Launch(told["number"], {}, None, None)

    def _committed(self, attempt: Attempt) -> list[str]:
        return self._history.committed(attempt) if self._team.rank == 0 else []

    def _on_plan(self, plan: Plan) -> None:
        self._warn_of_capacity(plan.layout.size)

    def _warn_of_capacity(self, size: int) -> None:
        if self._team.rank == 0 and size:
            kept = getattr(self._keep, "n", None)
            verdict = capacity.check_disk(self.run.store, size * self._team.world_size, kept)
            warning = capacity.settle(verdict)
            if warning:
                self._say(warning)

    def _tell(self, event: dict[str, Any]) -> None:
        with suppress(Exception):
            self._on_event(event)
        if event["state"] == "failed":
            self._say(f"the save of step {event['step']} was not committed: {event['error']}")


def _check_options(max_failed_saves: int, when_busy: str, slots: int, rank_timeout_s: float) -> None:
    if when_busy not in ("skip", "wait"):
        raise StateError(f"when_busy must be 'skip' or 'wait', not {when_busy!r}")
    for name, value in (("max_failed_saves", max_failed_saves), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StateError(f"{name} must be a whole number from 1 on, not {value!r}")
    if not rank_timeout_s > 0:
        raise StateError(f"rank_timeout_s must be above 0 seconds, not {rank_timeout_s!r}")


def _plain(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics without tensors and NumPy scalars."""
    return {str(k): v.item() if hasattr(v, "item") else v for k, v in (metrics or {}).items()}


def _named(kind: str) -> type[CheckpointError]:
    from ckpt import errors

    found = getattr(errors, kind, CheckpointError)
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else CheckpointError
