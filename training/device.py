"""The machine under a rank: device, threads, and what makes its results repeatable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from training.group import Group


def choose(trainer: Mapping[str, Any], group: Group) -> torch.device:
    """The device of this rank. Raises ValueError for one that is not there."""
    wanted = trainer.get("device") or "auto"
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != "cuda":
        raise ValueError(f"trainer.device={wanted!r} is unknown: choose auto, cpu or cuda")
    if group.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"trainer.device=cuda needs {group.local_world_size} CUDA device(s) on this machine, and torch "
            f"finds {torch.cuda.device_count()}: set trainer.device=cpu or a smaller launcher.nproc"
        )
    device = torch.device("cuda", group.local_rank)
    torch.cuda.set_device(device)
    return device


def prepare(trainer: Mapping[str, Any], group: Group) -> None:
    """Set threads and determinism as configured; null threads mean this rank's share of the machine."""
    share = max(1, len(os.sched_getaffinity(0)) // group.local_world_size)
    torch.set_num_threads(int(trainer.get("threads") or share))
    if trainer.get("deterministic", True):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # `use_deterministic_algorithms` would also import the compiler, to tell it; nothing is compiled here.
        torch.set_deterministic_debug_mode("error")
        # Filling fresh memory with NaN finds errors in operators; it costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
