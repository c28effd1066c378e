"""What happens to a commit: it is pinned, verified and registered, each in a Prefect task of its own.

Nothing here holds training. What has been done is derived by comparing storage with MLflow, so that a flow
which starts again after any crash catches up, and doing it twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from ckpt.checkpoint import Checkpoint
from ckpt.discover import attempts_of
from ckpt.errors import CheckpointError
from ckpt.names import MANIFEST
from ckpt.verification import verify
from flows import leases, registry, tracking
from flows.plan import Plan

if TYPE_CHECKING:
    from ckpt.run import Run
    from flows.tracking import Tracked

# How long a task may wait for MLflow at the end of training.
SETTLE_S = 60.0
_THREADS = 16


@task(name="pin", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def pin_commit(run: Run, checkpoint: Checkpoint) -> bool:
    """Keep retention away from a checkpoint while it is looked at. False if it is gone already."""
    return leases.hold(run, checkpoint)


@task(name="verify", cache_policy=NO_CACHE, persist_result=False)
def verify_commit(checkpoint: Checkpoint, full: bool) -> bool:
    """Check a checkpoint's files and sizes, or every byte. Raises what is wrong with it."""
    report = verify(checkpoint, quick=not full)
    if not report.ok:
        raise CheckpointError(f"{checkpoint.uri} is not what was committed: {'; '.join(report.problems)}")
    return True


@task(name="register", cache_policy=NO_CACHE, persist_result=False)
def register_commit(tracked: Tracked, name: str, checkpoint: Checkpoint, run_id: str) -> str:
    """Make the checkpoint a model in MLflow, and a version of the registered model; the version."""
    return registry.register(tracked, name, checkpoint, run_id).version


@dataclass
class _Handled:
    """A commit being seen to: which task runs for it now."""

    checkpoint: Checkpoint
    full: bool
    stage: str
    future: PrefectFuture[Any]


class Commits:
    """Follows a run's commits: `look` submits what has to be done next, `settle` waits for all of it.

    `say` gets one line for each failure. All calls come from the flow's main thread, where tasks are
    submitted.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.registers = bool(plan.composed.values["tracking"]["register"])
        self._stale = True
        self._seen: set[str] = set()
        self._waiting: list[Checkpoint] = []
        self._registered: set[str] | None = None
        self._handled: list[_Handled] = []
        self._verified = 0
        self.tracked: Tracked | None = None
        self.bad: list[str] = []

    def look(self, changed: bool = True) -> None:
        """Submit tasks for every commit that has not been looked at, oldest first, and for those that can go
        on. Storage is asked only if `changed` says that there may be news, and only about what is new."""
        self._stale = self._stale or changed
        if self._stale:
            self._waiting += self._new()
            self._stale = False
        # Until MLflow is open it can't be known what is registered already.
        if not self.registers or self.tracked is not None:
            waiting, self._waiting = self._waiting, []
            for checkpoint in waiting:
                if not self._is_registered(checkpoint):
                    self._begin(checkpoint)
        self._handled = [h for h in self._handled if self._advance(h)]

    def settle(self, seconds: float = SETTLE_S) -> None:
        """Look once more, and wait for what was submitted; what isn't done by then is named and left to a
        later flow."""
        deadline = time.monotonic() + seconds
        self.look()
        while self._handled and time.monotonic() < deadline:
            self._handled[0].future.wait(timeout=max(0.01, deadline - time.monotonic()))
            self._handled = [h for h in self._handled if self._advance(h)]
        for left in self._handled:
            self._say(f"{left.checkpoint.attempt} is not registered yet; the next resume catches up")

    def _new(self) -> list[Checkpoint]:
        """Commits that were not there before. One listing, and one question for each new attempt."""
        run = self._plan.run
        new = [each for each in attempts_of(run.store) if each.name not in self._seen]
        new.sort(key=lambda each: (each.launch, each.step, each.name))
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = pool.map(lambda each: run.store.size(f"{each.name}/{MANIFEST}"), new)
            there = [each for each, size in zip(new, sizes, strict=True) if size]
        self._seen.update(each.name for each in there)
        return [Checkpoint(run.uri, each.name, each.step, each.launch, run_id=run.id) for each in there]

    def _is_registered(self, checkpoint: Checkpoint) -> bool:
        if not self.registers or self.tracked is None:
            return False
        if self._registered is None:
            self._registered = self._ask_registered(self.tracked)
        return checkpoint.attempt in self._registered

    def _ask_registered(self, tracked: Tracked) -> set[str]:
        try:
            return registry.registered_attempts(tracked, self._plan.model_name, self._plan.run.id)
        except Exception as error:
            self._say(
                f"MLflow did not say what is registered ({_short(error)}); asking again for each checkpoint"
            )
            return set()

    def _begin(self, checkpoint: Checkpoint) -> None:
        every = self._plan.composed.values["checkpoint"]["verify"]["full_every"]
        self._verified += 1
        full = every > 0 and self._verified % every == 0
        pinned = pin_commit.submit(self._plan.run, checkpoint)
        self._handled.append(_Handled(checkpoint, full, "pin", pinned))

    def _advance(self, one: _Handled) -> bool:
        """Go on to the next task if the current one is done; False once nothing is left to do."""
        if not one.future.state.is_final():
            return True
        result = one.future.result(raise_on_failure=False)
        if not one.future.state.is_completed():
            self._say(f"{one.stage} of {one.checkpoint.attempt} failed: {_short(result)}")
            if one.stage == "verify":
                self.bad.append(one.checkpoint.attempt)
        elif one.stage == "pin" and result:
            one.stage, one.future = "verify", verify_commit.submit(one.checkpoint, one.full)
            return True
        elif one.stage == "verify" and self.registers and self.tracked is not None:
            plan = self._plan
            future = register_commit.submit(self.tracked, plan.model_name, one.checkpoint, plan.run.id)
            one.stage, one.future = "register", future
            return True
        leases.drop(self._plan.run, one.checkpoint)
        return False


def _short(error: Any) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def open_tracking(plan: Plan, launch: int, say: Callable[[str], None]) -> Tracked | None:
    """Open the run's MLflow run, and let the metrics sender send. None, with one line, if MLflow can't be
    used."""
    if plan.composed.values["tracking"]["uri"] is None:
        return None
    try:
        tracked = tracking.open_run(plan.run, plan.composed.values["tracking"], plan.composed.saved, launch)
        tracking.announce(tracked, plan.spool)
    except Exception as error:
        say(f"MLflow is away ({_short(error)}); training goes on, and its metrics wait in {plan.spool}")
        return None
    return tracked
