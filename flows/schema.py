"""What each node of the config takes. Nodes made by a `_target_` are checked against that target's
signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# A node that is made by its `_target_`.
Target = Any


@dataclass
class Trainer:
    """Options of the training loop."""

    max_steps: int
    batch_size: int
    accumulate: int
    clip_norm: float | None
    precision: Literal["fp32", "bf16", "fp16"]
    workers: int
    log_every: int
    eval_every: int
    eval_samples: int
    threads: int | None
    device: str
    deterministic: bool
    stop_grace_s: float


@dataclass
class Launcher:
    """How ranks are started."""

    nproc: int
    max_restarts: int
    retries: int
    env: dict


@dataclass
class S3:
    """How to talk to an S3 store; null leaves it to the environment."""

    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["path", "virtual"] | None = None
    ca_bundle: str | None = None
    checksums: Literal["when_required", "when_supported"] | None = None
    part_mib: int | None = None
    parts_in_flight: int | None = None
    deadline_s: float | None = None


@dataclass
class Storage:
    """Where runs are. `requires` names the kind of file system that the root has to be on."""

    root: str
    s3: S3 | None = None
    requires: Literal["nfs"] | None = None


@dataclass
class Verify:
    """How committed checkpoints are checked."""

    full_every: int


@dataclass
class Checkpoint:
    """The engine's options; `save` and `keep` are policies made by their `_target_`."""

    save: Target
    keep: Target
    when_busy: Literal["skip", "wait"]
    max_failed_saves: int
    slots: int
    threads: int
    digest: Literal["xxh3-128", "blake3"]
    confirm: Literal["digest", "size"]
    bandwidth_limit: float | None
    posthumous_s: float
    verify: Verify


@dataclass
class Tracking:
    """MLflow."""

    uri: str | None
    experiment: str
    registered_model: str | None
    register: bool
    tags: dict


@dataclass
class Root:
    """The whole config. `dict` marks nodes that are free: anything may stand in them."""

    run: str | None
    seed: int
    project: str
    extra: dict
    model: Target
    data: Target
    optim: Target
    schedule: Target
    strategy: Target
    trainer: Trainer
    launcher: Launcher
    storage: Storage
    checkpoint: Checkpoint
    tracking: Tracking


NODES = {c.__name__: c for c in (Trainer, Launcher, S3, Storage, Verify, Checkpoint, Tracking, Root)}

# Lowest and highest value of a number; None is no limit.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, 2**63 - 1),
    "trainer.max_steps": (1, None),
    "trainer.batch_size": (1, None),
    "trainer.accumulate": (1, None),
    "trainer.clip_norm": (0, None),
    "trainer.workers": (0, None),
    "trainer.log_every": (1, None),
    "trainer.eval_every": (0, None),
    "trainer.eval_samples": (1, None),
    "trainer.threads": (1, None),
    "trainer.stop_grace_s": (1, None),
    "launcher.nproc": (1, None),
    "launcher.max_restarts": (0, None),
    "launcher.retries": (0, None),
    "storage.s3.part_mib": (5, 5120),
    "storage.s3.parts_in_flight": (1, 256),
    "storage.s3.deadline_s": (0.1, 86400),
    "checkpoint.max_failed_saves": (1, None),
    "checkpoint.slots": (1, None),
    "checkpoint.threads": (1, None),
    "checkpoint.bandwidth_limit": (1, None),
    "checkpoint.posthumous_s": (0, None),
    "checkpoint.verify.full_every": (0, None),
    "checkpoint.save.every": (1, None),
    "checkpoint.save.minutes": (0, None),
    "checkpoint.save.percent": (1e-6, 100),
    "checkpoint.save.mtbf_hours": (1e-6, None),
    "checkpoint.save.first_s": (1e-6, None),
    "checkpoint.save.min_s": (0, None),
    "checkpoint.keep.steps": (1, None),
    "checkpoint.keep.n": (-1, None),
    "optim.lr": (0, None),
    "optim.weight_decay": (0, None),
}
