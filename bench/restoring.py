"""How long a restore takes, and whether what comes back is what was saved."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engines.base import Engine
from bench.places import Place, Prefix
from bench.workload import Workload


@dataclass(frozen=True)
class Restored:
    """Seconds of each restore, with caches dropped and warm. different: tensors that came back changed."""

    cold_s: list[float]
    warm_s: list[float]
    different: list[str]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure(
    engine: Engine, step: int, saved: dict[str, str], target: Workload, folder: Place, repeats: int
) -> Restored:
    """Restore `step` into `target` `repeats` times cold and as often warm, and compare each with `saved`.

    Raises what the engine raises.
    """
    cold: list[float] = []
    warm: list[float] = []
    different: set[str] = set()
    for times, drop in ((cold, True), (warm, False)):
        for _ in range(repeats):
            target.blank()
            if drop:
                drop_caches(folder)
            start = time.monotonic()
            engine.load(step, target)
            target.synchronize()
            times.append(time.monotonic() - start)
            found = target.digests()
            different |= {name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name)}
    return Restored(cold, warm, sorted(different))


def drop_caches(folder: Place) -> None:
    """Write all files below `folder` back and drop their pages from memory. Files may vanish meanwhile.

    A bucket's caches are its own.
    """
    if isinstance(folder, Prefix):
        return
    for place, _, names in os.walk(folder):  # unlike rglob, goes on where a folder has just been pruned
        for name in names:
            with suppress(FileNotFoundError):
                _drop(Path(place, name))


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
