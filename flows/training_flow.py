"""The part that train and resume share: follow one session under a flow run, to its end and its summary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed, Failed, State

from flows import summary, tracking
from flows.commits import Commits, open_tracking
from flows.plan import Plan
from flows.session import Session
from training.launch import Outcome

# The scheduler's grace is 30 s; this leaves time to tell Prefect and MLflow.
GRACE_S = 25.0
LOOK_EVERY_S = 1.0

# MLflow is opened once training runs, so that importing it does not delay the first step, or after this long.
OPEN_AFTER_S = 30.0

# After Ctrl-C little time is spent on what the next resume does anyway.
HURRIED_S = 2.0

_SESSIONS: dict[str, Session] = {}
_MLFLOW_STATUS = {"finished": "FINISHED", "preempted": "KILLED"}


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train_ranks(run_uri: str) -> str:
    """Train to the end or to a stop; how it ended."""
    session = _SESSIONS[run_uri]
    session.done.wait()
    assert session.outcome is not None
    return session.outcome.state


def follow(session: Session) -> State[Any]:
    """Follow a session that has been started: train in a task thread, see to commits, and end well.

    Returns the state for the flow run. On SIGTERM (TerminationSignal) the ranks save and stop first.
    """
    plan = session.plan
    say = session.terminal.line
    _SESSIONS[plan.run.uri] = session
    commits = Commits(plan, say)
    opener = _Opener(session, commits)
    try:
        future = train_ranks.submit(plan.run.uri)
        opener.start()
        while not session.done.is_set():
            changed = session.changed.wait(LOOK_EVERY_S)
            session.changed.clear()
            opener.adopt()
            _carefully(partial(commits.look, changed), say)
        future.wait(timeout=5)
        finished = session.outcome is not None and session.outcome.state == "finished"
        if finished and commits.registers and not session.quiet:
            say("training has ended; registering its checkpoints in MLflow")
        opener.finish(HURRIED_S if session.stop_reason else GRACE_S)
        _carefully(lambda: commits.settle(HURRIED_S) if session.stop_reason else commits.settle(), say)
    except TerminationSignal:
        session.stop("SIGTERM")
        session.done.wait(GRACE_S)
        opener.finish(HURRIED_S)
        _end_tracking(commits, _status(session.outcome), say)
        say(summary.stopped(session))
        raise
    finally:
        if not session.done.is_set():
            session.stop("its flow ended")
            session.done.wait(GRACE_S)
        _SESSIONS.pop(plan.run.uri, None)
    outcome = session.outcome
    assert outcome is not None
    _end_tracking(commits, _status(outcome), say)
    return _conclude(session, outcome, commits)


def _conclude(session: Session, outcome: Outcome, commits: Commits) -> State[Any]:
    say = _unsaid if session.quiet else session.terminal.line
    if outcome.state == "finished":
        say(summary.finished(session, commits))
        return Completed(message=f"finished at step {outcome.last_step}")
    if outcome.state == "preempted":
        say(summary.stopped(session))
        return Cancelled(
            message=f"stopped at step {outcome.last_step}: {session.stop_reason or outcome.cause}"
        )
    say(summary.failed(session, outcome))
    return Failed(message=f"{outcome.state}: {outcome.cause}")


def _unsaid(_: str) -> None:
    return None


def catch_up(plan: Plan, say: Callable[[str], None]) -> None:
    """For a run with nothing left to train: register what is not registered, and settle its MLflow status."""
    commits = Commits(plan, say)
    commits.tracked = open_tracking(plan, 0, say)
    _carefully(commits.settle, say)
    _end_tracking(commits, "FINISHED", say)


class _Opener:
    """Opens MLflow in a thread of its own once training runs: a server that hangs must hold nothing up."""

    def __init__(self, session: Session, commits: Commits) -> None:
        self._session = session
        self._commits = commits
        self._tracked: tracking.Tracked | None = None
        self._thread = threading.Thread(target=self._open, name="mlflow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adopt(self) -> None:
        """Give the open run to the main thread, which submits the tasks that use it."""
        if self._commits.tracked is None and self._tracked is not None:
            self._commits.tracked = self._tracked

    def finish(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)
        self.adopt()

    def _open(self) -> None:
        session = self._session
        session.stepped.wait(OPEN_AFTER_S)
        if session.done.is_set() and not session.progress.launch:
            return  # refused or failed before it trained: nothing to track
        self._tracked = open_tracking(session.plan, session.progress.launch, session.terminal.line)


def _status(outcome: Outcome | None) -> str:
    return "KILLED" if outcome is None else _MLFLOW_STATUS.get(outcome.state, "FAILED")


def _end_tracking(commits: Commits, status: str, say: Callable[[str], None]) -> None:
    if commits.tracked is not None:
        tracked = commits.tracked
        _carefully(lambda: tracking.end(tracked, status), say)


def _carefully(action: Callable[[], Any], say: Callable[[str], None]) -> None:
    """What goes wrong beside training is told, and training goes on."""
    try:
        action()
    except Exception as error:
        say(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
