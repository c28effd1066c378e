"""The checkpoint manager: what a training loop talks to."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckpt import capacity, hooks, inputs
from ckpt.attempts import Attempt
from ckpt.checkpoint import Checkpoint
from ckpt.deciding import Decider
from ckpt.ending import Ending, unless_success
from ckpt.errors import Fenced, StorageError
from ckpt.history import History
from ckpt.joining import join_team, named_error, shared_launch
from ckpt.launches import record_end
from ckpt.names import attempt_name
from ckpt.origin import Origin
from ckpt.planning import Plan
from ckpt.policies import EverySteps, KeepLast, KeepPolicy, SavePolicy
from ckpt.run import Run, open_run
from ckpt.saver import Saver
from ckpt.settling import Settler
from ckpt.stats import SaveStats, Tally
from ckpt.telling import Teller
from ckpt.writer.client import WriterClient
from ckpt.writer.options import WriterOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LEAVE_S = 30.0
_LEAST_S = 1.0
_LEAST_WAIT_S = 60.0
_TELL_S = 10.0
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
        inputs.check_options(max_failed_saves, when_busy, slots, rank_timeout_s)
        inputs.check_given(run, state, save, keep, config, overrides, say, on_event)
        inputs.check_writer(threads, bandwidth_limit, posthumous_s)
        options = WriterOptions(
            digest, threads, bandwidth_limit=bandwidth_limit, posthumous_s=posthumous_s, confirm=confirm
        )
        self.run = run if isinstance(run, Run) else open_run(run)
        self._state = state
        self._keep: KeepPolicy = keep if keep is not None else KeepLast(3)
        self._slots = slots
        self._wait_s = max(_LEAST_WAIT_S, rank_timeout_s)
        self._say = say or _log.warning
        self._teller = Teller(on_event, self._say)
        self._tally = Tally()
        self._team = join_team(process_group, self._wait_s)
        self.launch = shared_launch(self._team, self.run, config, overrides, self._say)
        self._origin = Origin(self.run, self.launch, self._team, config, self._say)
        self._history = History(self.run, self.launch.number, self._keep, self._say)
        self._step: int | None = None
        self._metrics: tuple[int, Mapping[str, Any] | None] | None = None
        self._calls = self._shared = self._begun = 0
        self._stop = self._ended = self._closed = self._went_on = False
        self._moved = False  # an optimizer has, since the state was that of `_step`
        self._ending = Ending()
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
            skipped=lambda step: self._teller.tell({"state": "skipped", "step": step}),
        )
        self._unhook = hooks.before_any_optimizer_step(self._join)
        hooks.in_forked_children(self._leave)

    @property
    def rank(self) -> int:
        """This process's rank in the process group."""
        return self._team.rank

    @property
    def parent(self) -> Checkpoint | None:
        """The checkpoint that this launch went on from."""
        return self._origin.parent

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

        inputs.check_usable(self._closed, self._went_on or self._begun > 0)
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
        self._went_on = True
        self._origin.went_on_from(found)
        if found is not None:
            self._step, self._moved = found.step, False
            if found.run_uri == self.run.uri:
                self._settler.last_committed_step = found.step
            self._saver.prepare()
        return found

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Say that training step `step` is done; saves if that is due. True if a save began.

        Raises what made saving fail `max_failed_saves` times in a row, Fenced if a newer launch
        took the run over, StateError for a state, a step or metrics that can't be stored.
        """
        inputs.check_usable(self._closed)
        step = inputs.plain_step(step)
        previous, self._step, self._moved = self._step, step, False
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
        self._begin(step, decision.token, decision.replan, metrics, self._wait_s)
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
        if not self._closed:
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
        failed; StateError if the state changed while it was copied.
        """
        timeout = inputs.plain_timeout(timeout)
        if not self._closed and not self._settler.drain(timeout):
            raise StorageError(
                f"a save was still being written after {timeout:g} s: the writer process goes on alone"
            )
        if self._settler.fenced:
            raise Fenced(self._settler.fenced)
        if self._settler.bad_in_a_row:
            raise named_error(self._settler.kind_of_failure, self._settler.last_failure)

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
        the writer process goes on with alone. If an optimizer has moved since the last step, the
        state is that of no step and is not saved, unless `final_step` is given and no exception is at
        work. Unless `finish` was called, or `end` is false, the launch is recorded as "finished";
        "failed" if this raises or an exception is at work; "preempted" without `save`, or after an
        interrupt. Raises StorageError if the last step could not be committed.
        """
        if self._closed:
            return
        timeout = inputs.plain_timeout(timeout)
        deadline = time.monotonic() + (timeout if timeout is not None else self._wait_s if save else _LEAVE_S)
        step = self._step if final_step is None else inputs.plain_step(final_step)
        end_as = self._ending.foresee(save, self._moved and step is not None, final_step is not None)
        if end_as.complaint:
            self._say(f"after step {self._step} {end_as.complaint}")
        try:
            if end_as.save:
                self._save_last(step, deadline)
        except BaseException as error:
            end_as.failed(str(error))
            raise
        finally:
            self._closed = True
            self._unhook()
            self._settler.drain(max(0.0, deadline - time.monotonic()))
            self._saver.close()
            self._settler.close(max(_LEAST_S, deadline - time.monotonic()))
            self._teller.close(max(_LEAST_S, min(_TELL_S, deadline - time.monotonic())))
            try:
                if end:
                    self.finish(end_as.outcome, end_as.cause)
            finally:
                self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close(save=unless_success(error) is None)

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
            tell=self._teller.tell,
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
        attempt = self._save(step, metrics, deadline)
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

    def _save(self, step: int, metrics: Mapping[str, Any] | None, deadline: float | None = None) -> Attempt:
        inputs.check_usable(self._closed)
        step = inputs.plain_step(step)
        self._step, self._moved = step, False
        self._shared += 1
        token, replan = self._team.share(
            f"save/{self._shared}", lambda: [secrets.token_hex(4), self._settler.take_replan()]
        )
        wait_s = self._wait_s if deadline is None else max(0.0, deadline - time.monotonic())
        return self._begin(step, token, replan, metrics, wait_s)

    def _begin(
        self, step: int, token: str, replan: bool, metrics: Mapping[str, Any] | None, wait_s: float
    ) -> Attempt:
        self._begun, start = self._begun + 1, time.perf_counter()
        metrics = inputs.plain_metrics(metrics)
        slot = self._settler.wait_any(self._slots, wait_s)
        self._decider.began()
        if replan:
            self._saver.prepare()
        name = attempt_name(step, self.launch.number, self._begun, token)
        lead = self._origin.lead if self._team.rank == 0 else None
        attempt = self._saver.begin(name, step, slot, metrics, lead)
        attempt.stall_s = time.perf_counter() - start  # a wait for a slot and a new plan count, too
        self._tally.add(stall_s=attempt.stall_s)
        return attempt

    def _join(self) -> None:
        if spent := self._saver.join():
            self._tally.add(join_s=spent)
        self._moved = True

    def _committed(self, attempt: Attempt) -> list[str]:
        return self._history.committed(attempt) if self._team.rank == 0 else []

    def _on_plan(self, plan: Plan) -> None:
        if self._team.rank == 0:
            size = plan.layout.size * self._team.world_size
            found = capacity.check_disk(self.run.store, size, capacity.kept_by(self._keep))
            if warning := capacity.settle(found):
                self._say(warning)
