"""Raw disk speed, in a process that imports no torch and shares no interpreter lock with training.

    python -m bench.rawio write|read PATH BYTES THREADS

prints one line of JSON: seconds, and whether O_DIRECT was taken.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

BLOCK = 16 << 20


def write(path: Path, size: int, threads: int) -> tuple[float, bool]:
    """Write `size` bytes (rounded up to pages) and make file and folder durable; seconds, O_DIRECT or not.

    Raises OSError.
    """
    buffers = _buffers(threads)
    start = time.monotonic()
    fd, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with suppress(OSError):
            os.posix_fallocate(fd, 0, size)
        _in_blocks(size, buffers, lambda view, offset: os.pwrite(fd, view, offset))
        os.fsync(fd)
    finally:
        os.close(fd)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return time.monotonic() - start, direct


def read(path: Path, size: int, threads: int) -> tuple[float, bool]:
    """Read `size` bytes of a file; seconds, O_DIRECT or not. Raises OSError."""
    buffers = _buffers(threads)
    fd, direct = _open(path, os.O_RDONLY)
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.monotonic()
        _in_blocks(size, buffers, lambda view, offset: os.preadv(fd, [view], offset))
        return time.monotonic() - start, direct
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        with suppress(FileNotFoundError):
            if flags & os.O_CREAT:
                path.unlink()  # the kernel makes the file before the file system refuses the flag
        return os.open(path, flags, 0o600), False


def _buffers(threads: int) -> list[memoryview]:
    found = []
    for _ in range(threads):
        buffer = memoryview(mmap.mmap(-1, BLOCK))
        buffer[:] = os.urandom(1 << 10) * (BLOCK >> 10)
        found.append(buffer)
    return found


def _in_blocks(size: int, buffers: list[memoryview], transfer: Callable[[memoryview, int], int]) -> None:
    numbers = count()
    failed: list[OSError] = []

    def work(buffer: memoryview) -> None:
        try:
            while (offset := next(numbers) * BLOCK) < size:
                length = -(-min(BLOCK, size - offset) // mmap.PAGESIZE) * mmap.PAGESIZE
                done = 0
                while done < length:
                    moved = transfer(buffer[done:length], offset + done)
                    if moved == 0:
                        break  # the end of the file
                    done += moved
        except OSError as error:
            failed.append(error)

    pool = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    way, place, nbytes, workers = sys.argv[1:]
    seconds, taken = (write if way == "write" else read)(Path(place), int(nbytes), int(workers))
    print(json.dumps({"seconds": seconds, "direct": taken}))
