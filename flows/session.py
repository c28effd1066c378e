"""One training under a flow: starts the trainer, follows its events, stops it, and says what a person should
see.

It exists before the flow run does, so that the ranks import torch while Prefect is still starting.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.errors import CheckpointError
from flows import leases
from flows.plan import Plan
from flows.progress import Progress
from flows.terminal import Terminal
from training.launch import LaunchSpec, Outcome, TrainerProcess

# A failed rank's last lines are shown, not all of its log.
TAIL_LINES = 12


class Session:
    """The launches of one flow run: the first, and as many more as `launcher.retries` allows after a failure.

    `tell` is for callers that tell the end in their own words: "all", "headline and progress" or "progress".
    `changed` is set at every event that may have changed what is on storage; `done` once nothing runs any
    more.
    """

    def __init__(self, plan: Plan, terminal: Terminal, began: float, tell: str = "all") -> None:
        self.plan = plan
        self._headline = tell != "progress"
        self.quiet = tell != "all"
        self.terminal = terminal
        self.progress = Progress(began, plan.composed.values["trainer"]["max_steps"])
        self.changed = threading.Event()
        self.stepped = threading.Event()
        self.done = threading.Event()
        self.outcome: Outcome | None = None
        self.stop_reason: str | None = None
        self._trainer: TrainerProcess | None = None

    def start(self) -> None:
        """Start the ranks and return at once."""
        self._trainer = TrainerProcess.start(self._spec())
        threading.Thread(target=self._follow, name="session", daemon=True).start()

    def stop(self, reason: str) -> None:
        """Ask the ranks to save and stop. May be called from any thread or signal handler, more than once."""
        self.stop_reason = self.stop_reason or reason
        if self._trainer is not None:
            self._trainer.request_stop(reason)

    def abandon(self) -> None:
        """End the ranks without a save, and don't wait long; a checkpoint writer that is busy finishes by
        itself."""
        self.stop_reason = self.stop_reason or "abandoned"
        if self._trainer is not None:
            self._trainer.kill()
            self.done.wait(3)

    def pids(self) -> list[int]:
        """Processes of the running launch."""
        return self._trainer.pids() if self._trainer is not None else []

    def _spec(self) -> LaunchSpec:
        plan = self.plan
        values, launcher = dict(plan.composed.values), plan.composed.values["launcher"]
        values["tracking"] = {**values["tracking"], "spool": str(plan.spool)}
        return LaunchSpec(
            config=values,
            saved_config=plan.composed.saved,
            overrides=plan.overrides,
            run_uri=plan.run.uri,
            nproc=launcher["nproc"],
            log_dir=plan.log_dir,
            env={**{k: str(v) for k, v in launcher["env"].items()}, "CKPT_SPOOL": str(plan.spool)},
            takeover=plan.takeover,
            which=plan.which,
            grace_s=values["trainer"]["stop_grace_s"],
        )

    def _follow(self) -> None:
        retries = self.plan.composed.values["launcher"]["retries"]
        try:
            while True:
                assert self._trainer is not None
                outcome = self._watch(self._trainer)
                if outcome.state != "failed" or self.stop_reason or retries <= 0:
                    break
                retries -= 1
                self._show_failure(outcome)
                self.terminal.line(f"starting again from the newest checkpoint ({retries} more to try)")
                self.plan = replace(self.plan, which="latest")
                self._trainer = TrainerProcess.start(self._spec())
                if self.stop_reason:
                    self._trainer.request_stop(self.stop_reason)
            self.terminal.settle(self.progress.line() if self.progress.step else None)
            if outcome.state == "failed":
                self._show_failure(outcome)
            self.outcome = outcome
        except BaseException as error:
            self.outcome = Outcome("failed", cause=f"{type(error).__name__}: {error}")
        finally:
            self.done.set()
            self.stepped.set()
            self.changed.set()

    def _watch(self, trainer: TrainerProcess) -> Outcome:
        named = False
        for event in trainer.events():
            line = self.progress.hear(event)
            if self._headline and not named and event.get("event") == "start":
                named = True
                self.terminal.line(self.plan.headline(self.progress.params))
            if line is not None and not (self.quiet and event.get("event") == "step"):
                self.terminal.line(line)
            if self.progress.first_step_s is not None:
                self.stepped.set()
                self.terminal.live(self.progress.line())
            if event.get("event") == "note":
                self.terminal.line(event["text"])
            if event.get("state") == "committed" and self.plan.composed.values["tracking"]["register"]:
                self._hold(event)
            if event.get("event") in ("save", "end", "restored"):
                self.changed.set()
        return trainer.wait()

    def _hold(self, event: dict[str, Any]) -> None:
        """Keep a new commit from being pruned before the flow has come to register it."""
        run, launch = self.plan.run, self.progress.launch
        try:
            leases.hold(run, Checkpoint(run.uri, event["attempt"], event["step"], launch, run_id=run.id))
        except CheckpointError as error:
            self.terminal.line(f"{event['attempt']} could not be pinned: {error}")

    def _show_failure(self, outcome: Outcome) -> None:
        self.terminal.settle()
        if self.quiet:
            return
        for rank, lines in outcome.tail.items():
            self.terminal.line(f"last lines of {f'rank {rank}' if rank >= 0 else 'torchrun'}:")
            for text in lines[-TAIL_LINES:]:
                self.terminal.line(f"  {text}")
        if self.plan.log_dir is not None and outcome.tail:
            self.terminal.line(f"whole logs: {self.plan.shown_logs()}")

    def elapsed(self) -> float:
        """Seconds since the command was given."""
        return time.monotonic() - self.progress.began
