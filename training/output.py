"""Where a rank's output goes: a file of its own, from before anything else can fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def unsettled(owner: str) -> str:
    """How names of log folders of this launch begin while it has no number."""
    return f"launching-{owner[:12]}-"


def redirect(folder: Path, rank: int) -> Path:
    """Send stdout and stderr of this process, C libraries included, to ``folder/rank-NNNNN.log``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return path


def settle(folder: Path, launch: int) -> Path:
    """Give the folder its launch's number, which is known only once the run is opened; open files follow."""
    settled = folder.parent / f"{launch:05d}"
    try:
        folder.rename(settled)
    except OSError:
        return folder  # a folder of that name is there already: this one keeps the name it has
    return settled
