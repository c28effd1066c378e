"""`make run`: train, kill the trainer on purpose, resume, and compare with the same run without a stop, bit
for bit.

It stands alone: its own Prefect server and database, MLflow in a file, everything under runs/.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from ckpt.errors import CheckpointError
from ckpt.launches import list_launches
from flows import commands, prefect_home
from flows.cli import process_start
from flows.interrupts import EXIT_CODE, Interrupts
from flows.overrides import ConfigError
from flows.plan import Plan, new_owner, plan_resume, plan_train, unused_name
from flows.session import Session
from flows.terminal import Terminal

STEPS, SAVE_EVERY, KILL_AT = 200, 20, 87
_SETTINGS = (f"trainer.max_steps={STEPS}", f"checkpoint.save.every={SAVE_EVERY}", "trainer.log_every=1")


class Demo:
    """The story, told once: `tell` returns the exit code. `extra` are overrides for all of its runs, `leave`
    is called where a second Ctrl-C ends everything at once. `lasting` says that the runs outlive this
    process, so that commands to go on with them make sense."""

    def __init__(
        self, extra: list[str], lasting: bool = True, leave: Callable[[], None] = lambda: None
    ) -> None:
        self._lasting = lasting
        self._leave_more = leave
        self.run_uri = ""
        self._extra = [*_SETTINGS, *extra]
        self._terminal = Terminal()
        self._server = prefect_home.OwnServer()
        self._session: Session | None = None
        self._interrupts = Interrupts(self._stop, self._leave)
        self._name = ""

    def tell(self) -> int:
        """From the first step to the champion."""
        prefect_home.isolate()
        prefect_home.configure()
        self._name = unused_name(self._extra)
        self._interrupts.install()
        killed_at = self._train_and_kill()
        if killed_at is None or self._interrupts.seen():
            return EXIT_CODE if self._interrupts.seen() else 1
        twin = self._twin()
        if twin is None:
            return EXIT_CODE if self._interrupts.seen() else 1
        return self._resume(twin)

    def _train_and_kill(self) -> int | None:
        """Train under the train flow until the trainer is killed; the step at which that was."""
        plan = plan_train([*self._extra, f"run={self._name}"], new_owner(), self._name)
        self.run_uri = plan.run.uri
        session = self._begin(plan, process_start(), "headline and progress")
        # A fast machine is past the step before Prefect's server is up; the flow then begins with a dead
        # trainer.
        killer = threading.Thread(target=self._kill, args=(session,), daemon=True)
        killer.start()
        atexit.register(self._server.stop)
        self._server.start()
        from flows import prefect_flows

        if not self._server.wait(self._interrupts.seen):
            session.done.wait()
            return None
        prefect_flows.hand_over(session)
        prefect_flows.call("train", plan.name, overrides=[*self._extra, f"run={plan.name}"])
        killer.join()
        if session.outcome is not None and session.outcome.state == "finished":
            self._terminal.line("training was over before the trainer could be killed; nothing to resume")
            return None
        return session.progress.step

    def _kill(self, session: Session) -> None:
        """SIGKILL the rank, as a machine that runs out of memory would."""
        session.stepped.wait()
        launches = list_launches(session.plan.run.store)
        while not session.done.is_set() and session.progress.step < KILL_AT:
            time.sleep(0.002)
        if session.done.is_set():
            return
        os.kill(launches[-1].info["pid"], signal.SIGKILL)
        self._terminal.settle(session.progress.line())
        self._terminal.line(f"killing the trainer on purpose (step {session.progress.step})")

    def _twin(self) -> Session | None:
        """The same run without a stop, beside Prefect and MLflow."""
        name = f"{self._name}-twin"
        twin = plan_train([*self._extra, "tracking=none", f"run={name}"], new_owner(), name)
        self._terminal.line("meanwhile the same run without a crash, to compare")
        session = self._begin(twin, time.monotonic())
        session.done.wait()
        return self._if_finished(session)

    def _resume(self, twin: Session) -> int:
        from flows import prefect_flows

        plan = plan_resume([f"run={self._name}", *self._where()])
        session = self._begin(plan, time.monotonic())
        prefect_flows.hand_over(session)
        prefect_flows.call("resume", plan.name, run=plan.name, overrides=self._where())
        if self._if_finished(session) is None:
            return EXIT_CODE if self._interrupts.seen() else 1
        ours, theirs = _digest(session), _digest(twin)
        start = f"finished {session.progress.step}"
        if ours is None or ours != theirs:
            self._terminal.line(f"{start}: NOT equal to the uninterrupted run ({ours} and {theirs})")
            return 1
        self._terminal.line(f"{start}: equal bit for bit to the uninterrupted run")
        state = prefect_flows.call("evaluate", plan.name, run=plan.name, overrides=self._where())
        for i, line in enumerate(self._next(plan) if self._lasting else []):
            self._terminal.line(f"{'next:' if i == 0 else '':5}  {line}")
        return 0 if state.is_completed() else 1

    def _next(self, plan: Plan) -> list[str]:
        more = f"trainer.max_steps={2 * STEPS}"
        return [
            commands.flow("resume", plan.name, self._where(), more),
            f"{commands.ckpt('ls', plan.run.uri)}   |   make ui",
        ]

    def _where(self) -> list[str]:
        return commands.where(self._extra)

    def _begin(self, plan: Plan, began: float, tell: str = "progress") -> Session:
        session = self._session = Session(plan, self._terminal, began, tell)
        session.start()
        if self._interrupts.seen():
            session.stop("Ctrl-C")
        return session

    def _if_finished(self, session: Session) -> Session | None:
        outcome = session.outcome
        if outcome is not None and outcome.state == "finished":
            return session
        self._terminal.line(f"{session.plan.name} did not finish: {outcome and outcome.cause}")
        for lines in (outcome.tail if outcome else {}).values():
            self._terminal.line("\n".join(lines))
        return None

    def _stop(self) -> None:
        self._terminal.line("saving and stopping; Ctrl-C once more leaves at once")
        if self._session is not None:
            self._session.stop("Ctrl-C")

    def _leave(self) -> None:
        if self._session is not None:
            self._session.abandon()
        self._server.kill()
        self._leave_more()


def _digest(session: Session) -> str | None:
    end = session.progress.end or {}
    return end.get("weights_digest")


def main() -> int:
    """Tell the story; arguments are overrides for its runs."""
    try:
        return Demo(sys.argv[1:]).tell()
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
