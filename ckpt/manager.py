"""The checkpoint manager: what a training loop talks to."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt import capacity, environment, hooks
from ckpt.attempts import Attempt
from ckpt.checkpoint import Checkpoint
from ckpt.deciding import Decider
from ckpt.errors import Fenced, StorageError
from ckpt.history import History
from ckpt.inputs import check_options, check_usable, plain_metrics, plain_step
from ckpt.joining import join_team, named_error, shared_launch
from ckpt.launches import parent_facts, record_end, record_parent
from ckpt.names import attempt_name
from ckpt.planning import Plan
from ckpt.policies import EverySteps, KeepLast, KeepPolicy, SavePolicy
from ckpt.run import Run, open_run
from ckpt.saver import Saver
from ckpt.settling import Settler
from ckpt.stats import SaveStats, Tally
from ckpt.writer.client import WriterClient
from ckpt.writer.options import WriterOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LEAVE_S = 30.0
_LEAST_S = 1.0
_LEAST_WAIT_S = 60.0
_log = logging.getLogger("ckpt")


class CheckpointManager:
    """Saves a training state without holding the training up, and restores it.

    All methods are called from the training thread, but `request_stop`, which may be called from anywhere.
    With a process group every rank makes a manager and makes the same calls. In a forked child it is closed.
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
        confirm: str = "digest",
        threads: int = 2,
        bandwidth_limit: float | None = None,
        posthumous_s: float = 120.0,
        rank_timeout_s: float = 600.0,
        say: Callable[[str], None] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Begin a launch of the run and start this rank's writer process.

        `state` maps entry names to modules, optimizers, objects with `state_dict`/`load_state_dict`, or
        plain values. `when_busy` says what a save does that is due while every slot is in use: "skip" or
        "wait". A save is void if a rank is not done `rank_timeout_s` after rank 0 is. `on_event` gets a dict
        per change of a save, from background threads too; `say` gets lines for people.

        Raises RunBusy, StateError, StorageError; on one rank what went wrong on rank 0.
        """
        check_options(max_failed_saves, when_busy, slots, rank_timeout_s)
        options = WriterOptions(
            digest, threads, bandwidth_limit=bandwidth_limit, posthumous_s=posthumous_s, confirm=confirm
        )
        self.run = run if isinstance(run, Run) else open_run(run)
        self._state = state
        self._keep: KeepPolicy = keep if keep is not None else KeepLast(3)
        self._slots = slots
        self._wait_s = max(_LEAST_WAIT_S, rank_timeout_s)
        self._say = say or _log.warning
        self._on_event = on_event or (lambda _: None)
        self._tally = Tally()
        self._team = join_team(process_group, self._wait_s)
        self.launch = shared_launch(self._team, self.run, config, overrides, self._say)
        self._config = config
        self.parent: Checkpoint | None = None
        self._parent_recorded = self._went_on = False
        self._history = History(self.run, self.launch.number, self._keep, self._say)
        self._step: int | None = None
        self._metrics: tuple[int, Mapping[str, Any] | None] | None = None
        self._calls = self._shared = self._begun = 0
        self._stop = self._ended = self._closed = False
        self._versions = environment.versions()
        if self._team.rank == 0:
            capacity.foresee(state, self.run.store, self._keep, slots, self._say)
        try:
            self._settler = self._make_settler(options, rank_timeout_s)
        except BaseException as error:
            self.finish("failed", str(error))
            raise
        self._saver = Saver(
            state,
            self._team,
            self._settler,
            slots=slots,
            timeout_s=self._wait_s,
            say=self._say,
            planned=self._on_plan,
        )
        self._decider = Decider(
            save if save is not None else EverySteps(50),
            self._team,
            self._settler,
            self._tally,
            slots=slots,
            when_busy=when_busy,
            max_failed=max_failed_saves,
            skipped=lambda step: self._tell({"state": "skipped", "step": step}),
        )
        self._unhook = hooks.before_any_optimizer_step(self._join)
        hooks.in_forked_children(self._leave)

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

        `which`: "latest", "step:N", an attempt's name, "best:METRIC:min|max", or "fresh", which
        refuses unless the run is empty. Raises what `ckpt.restore.restore_into` raises, and StateError
        once this launch has restored or saved; nothing live is touched then.
        """
        from ckpt.restore import restore_into

        check_usable(self._closed, self._went_on or self._begun > 0)
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
        self._went_on = True
        self._record_parent()
        if found is not None and self._team.rank == 0:
            now = self._versions | self._environment()
            then = found.manifest.versions | found.manifest.environment
            for line in environment.differences(then, now):
                self._say(f"the bits of this run may differ from those of the saved one: {line}")
        if found is not None:
            self._step = found.step
            if found.run_uri == self.run.uri:
                self._settler.last_committed_step = found.step
            self._saver.prepare()
        return found

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Say that training step `step` is done; saves if that is due. True if a save began.

        Raises what made saving fail `max_failed_saves` times in a row, Fenced if a newer launch
        took the run over, StateError for a state or a step that can't be stored.
        """
        check_usable(self._closed)
        step = plain_step(step)
        previous, self._step = self._step, step
        self._metrics = (step, metrics)
        if self._saver.has_plan:
            self._saver.check()
        else:
            self._tally.add(stall_s=self._saver.prepare())
        call, self._calls = self._calls, self._calls + 1
        stride = step - previous if previous is not None else 1
        decision = self._team.decide(
            call,
            lambda: self._decider.decide(step, previous),
            lambda: self._decider.decide(step + stride, step),
        )
        self._stop = self._stop or decision.stop
        if decision.error:
            raise named_error(*decision.error)
        if decision.token is None:
            return False
        self._begin(step, decision.token, decision.replan, metrics)
        return True

    def save(self, step: int, metrics: Mapping[str, Any] | None = None, wait: bool = False) -> None:
        """Save now, whatever the policy says, once a slot is free.

        Unlike `step`, it returns only when the state is copied and may be changed in any way; with
        `wait`, when it is committed. Raises StorageError if it could not be committed (with
        `wait`), StateError for a state that can't be stored.
        """
        if wait:
            self._save_and_wait(step, None, metrics)
        else:
            self._save(step, metrics).staged.wait()

    def wait_staged(self) -> None:
        """Return when the state may be changed outside `optimizer.step`."""
        self._saver.wait_staged()

    def request_stop(self) -> None:
        """Ask all ranks to stop at a step they agree on. Safe in a signal handler."""
        self._team.ask_stop()

    def stop_agreed(self, step: int) -> bool:  # noqa: ARG002
        """Whether all ranks stop after step `step`, the last one given to `step()`."""
        if self._team.world_size == 1:
            return self._team.stop_asked()
        return self._stop

    def drain(self, timeout: float | None = None) -> None:
        """Return when nothing is in flight. Raises StorageError after `timeout` seconds, or for what
        failed.
        """
        if not self._settler.drain(timeout):
            raise StorageError(
                f"a save was still being written after {timeout:g} s: the writer process goes on alone"
            )
        self._raise_failures()

    def close(
        self,
        final_step: int | None = None,
        save: bool = True,
        timeout: float | None = None,
        end: bool = True,
    ) -> None:
        """Commit the last step if it is not yet, then end the background work and the writer.

        `final_step` defaults to the last step given to `step()`; `save=False` begins no other save,
        but still waits for one in flight (30 s by default). What is not done in `timeout` seconds,
        the writer process goes on with alone. Unless `finish` was called, or `end` is false, the
        launch is recorded as "finished", or "failed" if this raises, or "preempted" without `save`.
        Raises StorageError if the last step could not be committed.
        """
        if self._closed:
            return
        deadline = time.monotonic() + (timeout if timeout is not None else self._wait_s if save else _LEAVE_S)
        outcome, cause = "finished" if save else "preempted", None
        try:
            if save:
                self._save_last(self._step if final_step is None else plain_step(final_step), deadline)
        except BaseException as error:
            outcome, cause = "failed", str(error)
            raise
        finally:
            self._closed = True
            self._unhook()
            self._settler.drain(max(0.0, deadline - time.monotonic()))
            self._saver.close()
            self._settler.close(max(_LEAST_S, deadline - time.monotonic()))
            if end:
                self.finish(outcome, cause)
            self._team.close()

    def finish(self, outcome: str, cause: str | None = None) -> None:
        """Record how the launch ended: "finished", "preempted" or "failed". Counts on rank 0, once."""
        if self._team.rank == 0 and not self._ended:
            self._ended = True
            record_end(self.run, self.launch, outcome, cause, self._step)

    def _leave(self) -> None:
        # A forked child has none of the threads, and its parent's arena, writer and launch are not its own.
        self._closed = self._ended = True
        self._unhook()

    def _make_settler(self, options: WriterOptions, rank_timeout_s: float) -> Settler:
        return Settler(
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

    def _save_last(self, step: int | None, deadline: float) -> None:
        self._settler.drain(max(0.0, deadline - time.monotonic()))
        if step is None or self._settler.last_committed_step == step:
            return
        for last_try in (False, True):
            try:
                self._save_and_wait(step, deadline, self._last_metrics(step))
                return
            except StorageError as error:
                # One bad moment, of the storage or of a state that moved, is no reason to lose the
                # end of a run.
                if last_try or self._settler.fenced or time.monotonic() >= deadline:
                    raise StorageError(f"the last step, {step}, could not be committed: {error}") from error

    def _save_and_wait(
        self, step: int, deadline: float | None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        attempt = self._save(step, metrics)
        self._settler.writer.hurry()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not attempt.done.wait(left):
            raise StorageError(f"step {step} was still being written: the writer process goes on alone")
        if self._settler.fenced:
            raise Fenced(self._settler.fenced)
        if not attempt.committed:
            raise StorageError(self._settler.last_failure or f"{attempt.name} was given up")

    def _last_metrics(self, step: int) -> Mapping[str, Any] | None:
        return self._metrics[1] if self._metrics is not None and self._metrics[0] == step else None

    def _save(self, step: int, metrics: Mapping[str, Any] | None) -> Attempt:
        check_usable(self._closed)
        self._step = step = plain_step(step)
        self._shared += 1
        token, replan = self._team.share(
            f"save/{self._shared}", lambda: [secrets.token_hex(4), self._settler.take_replan()]
        )
        return self._begin(step, token, replan, metrics)

    def _begin(self, step: int, token: str, replan: bool, metrics: Mapping[str, Any] | None) -> Attempt:
        self._begun, start = self._begun + 1, time.perf_counter()
        slot = self._settler.wait_any(self._slots, self._wait_s)
        self._decider.began()
        if replan:
            self._saver.prepare()
        name = attempt_name(step, self.launch.number, self._begun, token)
        lead = self._lead if self._team.rank == 0 else None
        attempt = self._saver.begin(name, step, slot, plain_metrics(metrics), lead)
        attempt.stall_s = time.perf_counter() - start  # a wait for a slot and a new plan count, too
        self._tally.add(stall_s=attempt.stall_s)
        return attempt

    def _raise_failures(self) -> None:
        if self._settler.fenced:
            raise Fenced(self._settler.fenced)
        if self._settler.bad_in_a_row:
            raise StorageError(self._settler.last_failure)

    def _join(self) -> None:
        if spent := self._saver.join():
            self._tally.add(join_s=spent)

    def _lead(self) -> dict[str, Any]:
        if not self._parent_recorded:
            self._record_parent()
        return {
            "parent": None if self.parent is None else parent_facts(self.run, self.parent),
            "config": self._config,
            "versions": self._versions,
            "environment": self._environment(),
        }

    def _environment(self) -> dict[str, Any]:
        return environment.environment() | {"world_size": self._team.world_size}

    def _record_parent(self) -> None:
        self._parent_recorded = True
        if self._team.rank == 0:
            record_parent(self.run, self.launch, self.parent)

    def _committed(self, attempt: Attempt) -> list[str]:
        return self._history.committed(attempt) if self._team.rank == 0 else []

    def _on_plan(self, plan: Plan) -> None:
        if self._team.rank == 0:
            size = plan.layout.size * self._team.world_size
            kept = capacity.kept_by(self._keep)
            warning = capacity.settle(capacity.check_disk(self.run.store, size, kept))
            if warning:
                self._say(warning)

    def _tell(self, event: dict[str, Any]) -> None:
        with suppress(Exception):
            self._on_event(event)
        if event["state"] == "failed":
            self._say(f"the save of step {event['step']} was not committed: {event['error']}")
