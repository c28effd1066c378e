"""What the hardware allows: raw copies, writes and reads of as many bytes as the state has."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engines.null import Null
from bench.loop import Loop
from bench.spec import READ_THREADS, WRITE_THREADS, Spec
from bench.workload import Workload

_LEAST_WINDOW, _LARGEST_WINDOW = 4, 64
_ROOM = 1.5


@dataclass(frozen=True)
class Limits:
    """Seconds for `state_bytes`, medians. `direct`: whether the file system takes O_DIRECT.

    memcpy_s and write_s: with the training step running beside, as saves have it; read_s: alone, as a
    restore is, read_beside_s: beside training. step_s: one training step; batch and window: what it was
    calibrated to, in samples and steps.
    """

    state_bytes: int
    memcpy_s: float
    write_s: float
    read_s: float
    read_beside_s: float
    direct: bool
    step_s: float
    batch: int
    window: int

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure(spec: Spec, work: Workload, folder: Path) -> Limits:
    """Calibrate the training step and measure the limits beside it.

    Raises OSError for a disk that can't be written.
    """
    copy = _copier(work)
    copy()  # the first one also touches the memory
    batch = spec.batch or work.calibrate(_median(lambda: _timed(copy), 3))
    loop = Loop(work, Null(), batch)
    loop.run(2)
    step_s = _median(lambda: loop.run(1), 5)
    memcpy_s = _median(lambda: _copy_beside(copy, loop), max(3, spec.repeats))

    disk = _Disk(folder / "raw", work.nbytes)
    write_s = _median(lambda: disk.run("write", WRITE_THREADS, loop), spec.repeats)
    read_beside_s = _median(lambda: disk.run("read", READ_THREADS, loop), spec.repeats)
    read_s = _median(lambda: disk.run("read", READ_THREADS, None), spec.repeats)
    disk.remove()
    window = spec.window or min(_LARGEST_WINDOW, max(_LEAST_WINDOW, math.ceil(_ROOM * write_s / step_s)))
    return Limits(work.nbytes, memcpy_s, write_s, read_s, read_beside_s, disk.direct, step_s, batch, window)


class _Disk:
    """One file of raw bytes, written anew each time."""

    def __init__(self, path: Path, size: int) -> None:
        self.direct = True
        self._path, self._size = path, size

    def run(self, way: str, threads: int, beside: Loop | None) -> float:
        if way == "write":
            self.remove()
        command = [sys.executable, "-m", "bench.rawio", way, str(self._path), str(self._size), str(threads)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while beside is not None and process.poll() is None:
                beside.run(1)
            out, err = process.communicate()
        if process.returncode:
            raise OSError(f"the raw {way} of {self._path} failed: {err.strip().splitlines()[-1:]}")
        found = json.loads(out)
        self.direct = self.direct and found["direct"]
        return float(found["seconds"])

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _copier(work: Workload) -> Callable[[], None]:
    sources = list(work.tensors().values())
    pinned = work.device.type == "cuda"
    into = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in sources]

    def copy() -> None:
        torch._foreach_copy_(into, sources, non_blocking=pinned)
        work.synchronize()

    return copy


def _copy_beside(copy: Callable[[], None], loop: Loop) -> float:
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(_timed(copy)))
    thread.start()
    while thread.is_alive():
        loop.run(1)
    thread.join()
    return took[0]


def _timed(call: Callable[[], None]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def _median(sample: Callable[[], float], times: int) -> float:
    return statistics.median(sample() for _ in range(times))
