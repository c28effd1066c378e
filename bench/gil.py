"""For how long a save's background threads hold the interpreter lock, which training then can't have.

A probe takes the training thread's place: again and again it computes for a moment without the lock and then
takes it back. Nothing but the lock can put it to sleep, so the kernel's count of its voluntary waits tells
whether the lock was taken at that very moment. The lengths of the turns that ended so are added up: a sample
of all moments, right on average however short the lock is held for each time.
"""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from bench import quiet
from bench.engines.base import WAIT_S
from bench.loop import Loop

# Long enough for a thread that waits for the lock to wake up and get it, as in a step of training.
TURN_S = 200e-6
_CONTROL_S = 0.3
_BYTES = 256 << 10


class Probe:
    """To be made while no other thread runs: it measures how much work lasts one turn."""

    def __init__(self) -> None:
        self._block = bytes(_BYTES)
        start = time.perf_counter()
        rounds = 0
        while time.perf_counter() - start < 20 * TURN_S:
            zlib.crc32(self._block)
            rounds += 1
        once = (time.perf_counter() - start) / rounds
        self._block = bytes(max(8 << 10, round(_BYTES * TURN_S / once)))

    def run(self, ended: Callable[[], bool]) -> tuple[float, float]:
        """Seconds for which other threads held the lock until `ended`, and seconds in all."""
        held = 0.0
        waits = _waits()
        start = last = time.perf_counter()
        while not ended():
            zlib.crc32(self._block)
            now, found = time.perf_counter(), _waits()
            if found != waits:
                held += now - last
            waits, last = found, now
        return held, last - start


def measure(loop: Loop, saves: int, folder: Path) -> list[float]:
    """Seconds per save, from the call's return until it is durable, less what is held without a save.

    No training runs meanwhile. Raises what makes a save fail, TimeoutError if it is not durable in time.
    """
    probe = Probe()
    found = []
    for _ in range(saves):
        idle_s, idle_total_s = probe.run(_after(_CONTROL_S))
        held: list[tuple[float, float]] = []

        def watch(held: list[tuple[float, float]] = held) -> None:
            late = _after(WAIT_S)
            held.append(probe.run(lambda: loop.engine.durable_at() is not None or late()))

        loop.run(1, save=True, after_call=watch)
        loop.engine.wait_durable()
        held_s, total_s = held[0]
        found.append(held_s - total_s * idle_s / idle_total_s)
        quiet.settle(loop, folder)
    return found


def _after(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
