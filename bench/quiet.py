"""What belongs to a save but not to its window: write-back, deletion, the engine's own tidying up."""

from __future__ import annotations

import ctypes
import os
import threading
import time

from bench.engines.base import Engine
from bench.loop import Loop
from bench.places import Place, Prefix


def settle(loop: Loop, folder: Place) -> float:
    """Train unmeasured, one step at least, until nothing of the last save is going on any more.

    The save has to be durable. Returns the seconds for which the machine still wrote back what the engine had
    left in memory. Raises what makes the tidying up fail.
    """
    found: list[float | BaseException] = []

    def work() -> None:
        try:
            found.append(tidy(loop.engine, loop.saved_step, folder))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    loop.run(1)
    while thread.is_alive():
        loop.run(1)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def tidy(engine: Engine, step: int, folder: Place) -> float:
    """Write back what a durable save left in memory, and then delete the save; the seconds of the first."""
    start = time.monotonic()
    write_back(folder)
    seconds = time.monotonic() - start
    engine.discard(step)
    write_back(folder)
    return seconds


def write_back(folder: Place) -> None:
    """Return when the file system of `folder` holds all that was written to it. Raises OSError.

    A bucket holds it already, but a store on this machine may not have written it back.
    """
    if isinstance(folder, Prefix):
        if folder.disk is None:
            return
        folder = folder.disk
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(fd)
