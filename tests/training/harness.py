"""Launches of toy runs: in this process, where a launch takes a fraction of a second, or under torchrun."""

from __future__ import annotations

import copy
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.run import open_run
from training.control import Control
from training.group import Group
from training.launch import LaunchSpec, TrainerProcess
from training.session import Session
from training.stop import SIGNALS, Stop

TINY: dict[str, Any] = {
    "seed": 3,
    "model": {"_target_": "tests.training.toys.Net"},
    "data": {"_target_": "tests.training.toys.Toy"},
    "optim": {"_target_": "training.optim.adamw", "lr": 0.01},
    "schedule": {"_target_": "training.schedules.warmup_cosine", "max_steps": 32, "warmup": 4, "floor": 0.1},
    "strategy": {"_target_": "training.strategies.single.Single"},
    "trainer": {
        "max_steps": 32,
        "batch_size": 4,
        "accumulate": 1,
        "clip_norm": 1.0,
        "precision": "fp32",
        "workers": 0,
        "log_every": 1,
        "eval_every": 0,
        "eval_samples": 16,
        "threads": 1,
        "device": "cpu",
        "deterministic": True,
        "stop_grace_s": 20,
    },
    "checkpoint": {
        "save": {"_target_": "ckpt.EverySteps", "every": 5},
        "keep": None,
        "when_busy": "wait",
        "posthumous_s": 20,
    },
    "launcher": {"nproc": 1, "max_restarts": 0},
    "tracking": None,
}


def config(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """TINY with dotted keys changed."""
    made = copy.deepcopy(TINY)
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        node = made
        for name in path:
            node = node[name]
        node[last] = value
    return made


@dataclass
class Trace:
    """What launches did: events by name, and one entry per update in ``steps``."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def steps(self) -> list[tuple[int, float, float, float]]:
        return [(e["step"], e["loss"], e["lr"], e.get("grad_norm", 0.0)) for e in self.of("step")]

    @property
    def end(self) -> dict[str, Any]:
        return self.of("end")[-1]

    @property
    def notes(self) -> str:
        return "\n".join(event["text"] for event in self.of("note"))


class _Listener(Control):
    """Collects events; sends this process a signal at the step it is told."""

    def __init__(self, trace: Trace, stop_at: int | None, how: signal.Signals) -> None:
        super().__init__(None, 0, 0, None, 0)
        self._trace, self._stop_at, self._how = trace, stop_at, how

    def event(self, name: str, **fields: Any) -> None:
        self._trace.events.append({"event": name, **fields})
        if name == "step" and fields["step"] == self._stop_at:
            signal.raise_signal(self._how)


def job(run: Path, settings: dict[str, Any], which: str = "latest") -> dict[str, Any]:
    return {
        "config": settings,
        "saved_config": settings,
        "overrides": [],
        "run_uri": str(run),
        "takeover": False,
        "which": which,
        "log_dir": None,
    }


def train_here(
    run: Path,
    settings: dict[str, Any],
    stop_at: int | None = None,
    how: signal.Signals = signal.SIGTERM,
    trace: Trace | None = None,
    which: str = "latest",
) -> Trace:
    """One launch in this process, as on rank 0; with ``stop_at`` a signal comes right after that update.

    Whatever random state the process is in beforehand must not matter, so it is stirred.
    """
    trace = Trace() if trace is None else trace
    random.seed()
    np.random.seed()
    torch.seed()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = Stop()
    stop.install()
    session = None
    try:
        open_run(str(run))
        session = Session(
            job(run, settings, which), Group(0, 1, 0, 1, 0), _Listener(trace, stop_at, how), stop
        )
        session.begin()
        session.train()
    except BaseException as error:
        if session is not None:
            session.failed(str(error))
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        torch.set_deterministic_debug_mode("default")
    return trace


def ids(path: Path) -> list[int]:
    """The sample ids in a toy's trace file, in order."""
    return [int(word) for word in path.read_text().split()]


def spec(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> LaunchSpec:
    """A launch of a toy run under torchrun."""
    open_run(str(run))
    return LaunchSpec(config(changes), [], str(run), log_dir=run / "logs", **more)


def start(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> TrainerProcess:
    return TrainerProcess.start(spec(run, changes, **more))
