"""What the hardware allows: raw copies, writes and reads of as many bytes as the state has."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from bench.copying import Copier
from bench.disk import RawDisk, raw
from bench.engines.null import Null
from bench.loop import Loop
from bench.places import Place, Prefix
from bench.spec import Spec
from bench.workload import Workload

_LEAST_WINDOW, _LARGEST_WINDOW = 4, 64


@dataclass(frozen=True)
class Limits:
    """Seconds for `state_bytes`, each sample. `direct`: whether the file system takes O_DIRECT.

    memcpy_s and write_s: with the training step running beside, as saves have it; read_s: alone, as a
    restore is, read_beside_s: beside training. step_s: one training step; batch and window: what it was
    calibrated to, in samples and steps.
    """

    state_bytes: int
    memcpy_s: list[float]
    write_s: list[float]
    read_s: list[float]
    read_beside_s: list[float]
    direct: bool
    step_s: list[float]
    batch: int
    window: int

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure(spec: Spec, work: Workload, folder: Place) -> Limits:
    """Measure the limits beside the training step, which is calibrated first where `spec` says nothing.

    Between two transfers lies a window of training, as between two saves: a disk that may be fast for a
    while and has to rest then is given the same rest. Raises OSError for a disk that can't be written.
    """
    copier = Copier(work)
    _copy(copier)  # the first one is slower
    batch = spec.batch or work.calibrate(statistics.median(_copy(copier) for _ in range(3)))
    loop = Loop(work, Null(), batch)
    loop.run(2)
    steps = [loop.run(1) for _ in range(5)]
    copies = [_copy(copier, beside=loop) for _ in range(spec.raw_repeats)]
    copier.close()

    disk = raw(folder / "raw", work.nbytes)
    if isinstance(folder, Prefix):
        _move(disk, "write", loop)  # a new store makes its files, and a client its connections, only now
    first_s = _move(disk, "write", loop)
    room = math.ceil(first_s / statistics.median(steps))
    window = spec.window or min(_LARGEST_WINDOW, max(_LEAST_WINDOW, room))
    found: dict[str, list[float]] = {"write": [], "read_beside": [], "read": []}
    for _ in range(spec.raw_repeats):
        for name, beside in (("write", loop), ("read_beside", loop), ("read", None)):
            loop.run(window)
            found[name].append(_move(disk, name.partition("_")[0], beside))
    direct = disk.wait().direct
    disk.close()
    return Limits(
        work.nbytes,
        copies,
        found["write"],
        found["read"],
        found["read_beside"],
        direct,
        steps,
        batch,
        window,
    )


def _move(disk: RawDisk, way: str, beside: Loop | None) -> float:
    disk.begin(way)
    while beside is not None and disk.done() is None:
        beside.run(1)
    return disk.wait().seconds


def _copy(copier: Copier, beside: Loop | None = None) -> float:
    copier.begin()
    if beside is not None:
        beside.run(1)
    return copier.wait()
