"""For how long a save's background threads hold the interpreter lock, which training then can't have.

A probe takes the training thread's place: again and again it computes for a moment without the lock and then
takes it back. Nothing but the lock can put it to sleep, so the kernel's count of its voluntary waits tells
whether the lock was taken at that very moment. The lengths of the turns that ended so are added up: a sample
of all moments, right on average however short the lock is held for each time.

The probe has a processor that the process's other threads are kept from: else such a thread would often run
in the place of the probe, and the lock would be free again whenever the probe comes to look.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from bench import quiet
from bench.engines.base import WAIT_S
from bench.loop import Loop

# Long enough for a thread that waits for the lock to wake up and get it, as in a step of training.
TURN_S = 200e-6
_CONTROL_S = 0.3
_LOOK_S = 50e-3
_LONGEST_WAKING_S = 500e-6
_BYTES = 256 << 10
_FEWEST_BYTES = 32 << 10  # for half as many zlib does let go of the lock
_TURNS, _LONGEST = 64, 1.5


class Probe:
    """To be made while no other thread runs: it measures how much work lasts one turn."""

    def __init__(self) -> None:
        block = bytes(_BYTES)
        start = time.perf_counter()
        rounds = 0
        while time.perf_counter() - start < 20 * TURN_S:
            zlib.crc32(block)
            rounds += 1
        once = (time.perf_counter() - start) / rounds
        turn = memoryview(bytes(max(_FEWEST_BYTES, round(_LONGEST * _BYTES * TURN_S / once))))
        # Of unequal length, so as not to keep step with what other threads do.
        shares = [0.5 + number / _TURNS for number in range(_TURNS)]
        random.Random(0).shuffle(shares)
        self._work = [(turn[: round(len(turn) * share / _LONGEST)], share * TURN_S) for share in shares]

    def run(self, ended: Callable[[], bool]) -> tuple[float, float]:
        """Seconds for which other threads held the lock until `ended`, and seconds in all."""
        allowed = os.sched_getaffinity(0)
        alone, others = _split(allowed)
        os.sched_setaffinity(0, alone)
        try:
            waits, total = self._turns(ended, others)
        finally:
            _confine(allowed)
            os.sched_setaffinity(0, allowed)
        return _held_s(waits), total

    def _turns(self, ended: Callable[[], bool], others: set[int]) -> tuple[list[tuple[float, float]], float]:
        """Seconds of work and of waiting of each turn at whose end the lock was taken; seconds in all."""
        found = []
        turns = cycle(self._work)
        looked = 0.0
        slept = _times_slept()
        start = last = time.perf_counter()
        while not ended():
            if last - looked > _LOOK_S:
                looked = last
                _confine(others)
            work, usual = next(turns)
            zlib.crc32(work)
            now, before = time.perf_counter(), slept
            slept = _times_slept()
            if slept != before:
                found.append((usual, max(0.0, now - last - usual)))
            last = now
        return found, last - start


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


def _held_s(taken: list[tuple[float, float]]) -> float:
    """The seconds that the lock was taken for, by the turns at whose end it was.

    Among many waits there are some for a lock that was about to be free. They last as long as it takes to
    wake up, and by that all are too long.
    """
    waits = sorted(wait for _, wait in taken)
    waking = min(waits[len(waits) // 10], _LONGEST_WAKING_S) if waits else 0.0
    return sum(usual + max(0.0, wait - waking) for usual, wait in taken)


def _split(allowed: set[int]) -> tuple[set[int], set[int]]:
    """A processor for the probe and those for the other threads; the same if there is one only."""
    alone = {max(allowed)}
    return alone, (allowed - alone) or allowed


def _confine(processors: set[int]) -> None:
    """Keep all threads of this process but the calling one to these processors."""
    me = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != me:
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(task.name), processors)


def _after(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


def _times_slept() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
