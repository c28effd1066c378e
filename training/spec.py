"""What a launch is asked to do and how it ended; plain values that cross the process border as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTROL = "CKPT_CONTROL"  # path of the control socket: events out, stop requests in
CONFIG = "CKPT_CONFIG"  # path of the JSON file with what Job holds
OWNER = "CKPT_LAUNCH_OWNER"  # the same for all ranks and elastic restarts of one launch
SPOOL = "CKPT_SPOOL"  # folder for metrics that are not sent yet

FINISHED, PREEMPTED, FAILED, REFUSED, FENCED = "finished", "preempted", "failed", "refused", "fenced"


@dataclass(frozen=True)
class LaunchSpec:
    """One launch of training.

    ``config`` is the plain resolved configuration and may hold secrets; ``saved_config`` is what may be
    written into the run (``config`` where None). ``log_dir`` is the folder of the run's logs: each launch
    gets ``log_dir/NNNNN/rank-NNNNN.log``; None keeps logs only as long as the launch. ``which`` names the
    checkpoint to start from. ``grace_s`` is how long a stop may take before everything is killed.
    """

    config: Mapping[str, Any]
    overrides: list[str]
    run_uri: str
    nproc: int = 1
    log_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    takeover: bool = False
    which: str = "latest"
    grace_s: float = 30.0
    saved_config: Mapping[str, Any] | None = None

    def job(self) -> dict[str, Any]:
        """The part of the specification that the ranks read."""
        return {
            "config": dict(self.config),
            "saved_config": dict(self.config if self.saved_config is None else self.saved_config),
            "overrides": list(self.overrides),
            "run_uri": str(self.run_uri),
            "takeover": self.takeover,
            "which": self.which,
            "log_dir": None if self.log_dir is None else str(self.log_dir),
        }


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: finished, preempted, failed, refused (a live launch owns the run) or fenced.

    ``cause`` is the first cause of anything but a finish. ``tail`` holds the last lines of every rank's log
    when it failed; key -1 is the launcher's own output. ``returncode`` is torchrun's, or 0.
    """

    state: str
    last_step: int | None = None
    cause: str | None = None
    returncode: int | None = None
    tail: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateSpec:
    """One evaluation of a committed checkpoint. ``samples`` bounds the validation samples (None: all)."""

    config: Mapping[str, Any]
    checkpoint: str
    samples: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
