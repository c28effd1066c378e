"""Raw disk speed, in a process that imports no torch and shares no interpreter lock with training.

    python -m bench.rawio THREADS

does what it is told by lines of JSON ({"do": "write" or "read", "path": PATH, "bytes": BYTES, "threads": N})
and answers each with one: seconds, whether O_DIRECT was taken, and when it was done, on the machine's
monotonic clock; or the error. THREADS: the most that will be asked for. It ends with its input.
"""

from __future__ import annotations

import ctypes
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
from typing import Any

from ckpt import huge_pages

BLOCK = 16 << 20


def write(path: Path, size: int, buffers: list[memoryview]) -> tuple[float, bool]:
    """Write `size` bytes (rounded up to pages) to a new file, with a thread for each of `buffers`, and make
    file and folder durable; seconds, O_DIRECT or not.

    Raises OSError.
    """
    start = time.monotonic()
    fd, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        # Not posix_fallocate: where that is not supported, the C library writes into every block instead.
        ctypes.CDLL(None).fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
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


def read(path: Path, size: int, buffers: list[memoryview]) -> tuple[float, bool]:
    """Read `size` bytes of a file; seconds, O_DIRECT or not. Raises OSError."""
    fd, direct = _open(path, os.O_RDONLY)
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.monotonic()
        _in_blocks(size, buffers, lambda view, offset: os.preadv(fd, [view], offset))
        return time.monotonic() - start, direct
    finally:
        os.close(fd)


def block_buffers(number: int) -> list[memoryview]:
    """That many buffers of one block, on memory that is there already."""
    found = [huge_pages.private_memory(BLOCK) for _ in range(number)]
    for buffer in found:
        buffer[:] = os.urandom(1 << 10) * (BLOCK >> 10)
    return found


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        with suppress(FileNotFoundError):
            if flags & os.O_CREAT:
                path.unlink()  # the kernel makes the file before the file system refuses the flag
        return os.open(path, flags, 0o600), False


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


def _answer(asked: dict[str, Any], buffers: list[memoryview]) -> dict[str, Any]:
    do = {"write": write, "read": read}[asked["do"]]
    try:
        seconds, direct = do(Path(asked["path"]), asked["bytes"], buffers[: asked["threads"]])
    except OSError as error:
        return {"error": str(error)}
    return {"seconds": seconds, "direct": direct, "at": time.monotonic()}


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Say that all is ready, and answer every line of standard input."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    memory = block_buffers(int(sys.argv[1]))
    serve(lambda asked: _answer(asked, memory))
