"""For how long a save's background threads hold the interpreter lock, which training then can't have.

A probe takes the training thread's place: again and again it computes for a moment without the lock and then
takes it back. Nothing but the lock can put it to sleep, so the kernel's count of its voluntary waits tells
whether the lock was taken at that very moment. The moments are random: right on average, however short the
lock is held for each time.

The probe has a processor that the process's other threads are kept from: else such a thread would often run
in the place of the probe, and the lock would be free again whenever the probe comes to look.
"""

from __future__ import annotations

import math
import os
import random
import resource
import statistics
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
from bench.places import Place

# Long enough for a thread that waits for the lock to wake up and get it, as in a step of training.
TURN_S = 200e-6
_CONTROL_S = 0.3
_LOOK_S = 50e-3
_BYTES = 256 << 10
_FEWEST_BYTES = 8 << 10  # with fewer zlib does not let go of the lock
_TURNS = 64


class Probe:
    """To be made while no other thread runs: it measures how much work lasts a turn, and how it wakes up."""

    def __init__(self) -> None:
        block = bytes(_BYTES)
        start, rounds = time.perf_counter(), 0
        while time.perf_counter() - start < 20 * TURN_S:
            zlib.crc32(block)
            rounds += 1
        speed = rounds * _BYTES / (time.perf_counter() - start)
        # As far apart as chance would have it, so as not to keep step with what other threads do.
        lengths = [-TURN_S * math.log((number + 0.5) / _TURNS) for number in range(_TURNS)]
        random.Random(0).shuffle(lengths)
        longest = memoryview(bytes(_FEWEST_BYTES + round(speed * max(lengths))))
        self._work = [(longest[: max(_FEWEST_BYTES, round(speed * s))], s) for s in lengths]
        self._waking_s = self._measure_waking()

    def run(self, ended: Callable[[], bool]) -> tuple[float, float]:
        """Seconds for which other threads held the lock until `ended`, and seconds in all."""
        waits: list[float] = []
        total = self._turns(ended, lambda _, wait: waits.append(wait))
        return held_s(waits, self._waking_s), total

    def _turns(self, ended: Callable[[], bool], taken: Callable[[float, float], None]) -> float:
        """Seconds in all. `taken` is told of each turn at whose end the lock was taken: when the probe had it
        at last, and for how long it had waited.
        """
        allowed = os.sched_getaffinity(0)
        alone, others = _split(allowed)
        os.sched_setaffinity(0, alone)
        try:
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
                    taken(now, max(0.0, now - last - usual))
                last = now
            return last - start
        finally:
            _confine(allowed)
            os.sched_setaffinity(0, allowed)

    def _measure_waking(self) -> float:
        """How long the probe takes to run again after the lock has become free."""
        freed, late = [0.0], []
        done = _after(_CONTROL_S)

        def hold() -> None:
            while not done():
                until = _after(3 * TURN_S)
                while not until():
                    pass
                freed[0] = time.perf_counter()
                time.sleep(TURN_S)

        thread = threading.Thread(target=hold)
        thread.start()
        self._turns(done, lambda now, _: late.append(now - freed[0]))
        thread.join()
        return statistics.median(late) if late else 0.0


def held_s(waits: list[float], waking_s: float) -> float:
    """The seconds that the lock was held for, by the waits (seconds) of the turns at whose end it was taken.

    Turns end at random moments, one in `TURN_S` of the time without the lock on average: each that finds it
    taken stands for as much. The wait itself lasts `waking_s` longer than the lock was taken.
    """
    return sum(TURN_S + max(0.0, wait - waking_s) for wait in waits)


def measure(loop: Loop, saves: int, folder: Place) -> list[float]:
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
