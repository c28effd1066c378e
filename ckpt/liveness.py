"""Whether a launch still lives: by process identity where that can be seen, else by whether its counter
moves.

Clocks and file times of other machines mean nothing here. A beat is a counter that rank 0's writer process
rewrites every few seconds; an opener that can't see the process watches it on its own monotonic clock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckpt.errors import Corrupt, StorageError
from ckpt.names import launch_file
from ckpt.sealed import canonical, parse_object
from ckpt.store import Store

BEAT_EVERY_S = 5.0
WATCH_S = 20.0
TRAINING, DRAINING = "training", "draining"
_MAX_BEAT = 64 << 10
_POLL_S = 0.25


@dataclass(frozen=True)
class Liveness:
    """Whether a launch lives, how that was found out, and who it is (None where unknown)."""

    live: bool
    reason: str
    host: str | None = None
    pid: int | None = None
    step: int | None = None


@cache
def this_machine() -> dict[str, str]:
    """Host name, boot id and process namespace: pids mean the same process only where all three are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "pid_ns": str(Path("/proc/self/ns/pid").readlink())}


def identity() -> dict[str, Any]:
    """This process: the machine, pid, and the time it started, in clock ticks since boot."""
    pid = os.getpid()
    return {**this_machine(), "pid": pid, "pid_start": pid_start(pid)}


def pid_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, it names the process for good.

    None if there is no such process, or it has ended and only waits to be reaped.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def process_alive(who: dict[str, Any]) -> bool | None:
    """Whether the process that `identity` described lives; None if it can't be seen from here."""
    if any(who.get(key) != value for key, value in this_machine().items()):
        return None
    pid, start = who.get("pid"), who.get("pid_start")
    if type(pid) is not int or type(start) is not int or pid <= 0:
        return None
    now = pid_start(pid)
    return None if now is None and _hidden(pid) else now == start


def _hidden(pid: int) -> bool:
    """Whether a process of another user is there that /proc doesn't show (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False


def beat(store: Store, number: int, counter: int, *, step: int | None, phase: str) -> None:
    """Write one beat of the calling process, rank 0's writer. Raises StorageError.

    `phase` is `training`, or `draining` once the trainer is gone.
    """
    content = {**identity(), "counter": counter, "step": step, "phase": phase}
    store.put(launch_file(number, "beat"), canonical(content), durable=False)


def read_beat(store: Store, number: int) -> dict[str, Any]:
    """The last beat of a launch; empty if there is none, or none that can be read."""
    try:
        return parse_object(store.read(launch_file(number, "beat"), _MAX_BEAT), "the beat")
    except (FileNotFoundError, Corrupt):
        return {}


@contextmanager
def beating(store: Store, number: int) -> Iterator[None]:
    """Beat for a launch whose writer doesn't run yet, so that openers elsewhere see that it lives."""
    stop = threading.Event()

    def keep_beating() -> None:
        counter = 0
        while True:
            counter += 1
            # One beat that can't be written is no reason to give up: an opener waits for several.
            with suppress(StorageError):
                beat(store, number, counter, step=None, phase=TRAINING)
            if stop.wait(BEAT_EVERY_S):
                return

    thread = threading.Thread(target=keep_beating, name="ckpt-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_live(
    store: Store,
    number: int,
    info: dict[str, Any],
    *,
    ended: bool = False,
    watch_s: float = WATCH_S,
    say: Callable[[str], None] = lambda _: None,
) -> Liveness:
    """Whether launch `number`, whose file holds `info`, lives. May take `watch_s` seconds. Raises
    StorageError.

    `ended` says that the launch recorded its own end. On the machine of the trainer its process decides at
    once; elsewhere a beat in phase `training` has to change.
    """
    last = read_beat(store, number)
    host, pid, step = _text(info.get("host")), _number(info.get("pid")), _number(last.get("step"))
    if ended:
        return Liveness(False, "it recorded its end", host, pid, step)
    alive = process_alive(info)
    if alive is not None:
        reason = "its process is running" if alive else "its process is gone"
        return Liveness(alive, reason, host, pid, step)
    say(f"watching for {watch_s:.0f} s whether launch {number} on {host or 'an unknown host'} still lives")
    moved = watch(store, number, last, watch_s)
    if moved is None:
        return Liveness(False, f"its counter stood still for {watch_s:.0f} s", host, pid, step)
    step = _number(moved.get("step"))
    if moved.get("phase") == DRAINING:
        return Liveness(False, "its trainer is gone and its writer is finishing", host, pid, step)
    return Liveness(True, "its counter moves", host, pid, step)


def watch(store: Store, number: int, last: dict[str, Any], watch_s: float) -> dict[str, Any] | None:
    """The first beat that differs from `last`, or None if none comes within `watch_s` seconds."""
    deadline = time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(min(_POLL_S, watch_s))
        now = read_beat(store, number)
        if now and now.get("counter") != last.get("counter"):
            return now
    return None


def wait_for_writer(
    store: Store,
    number: int,
    *,
    deadline_s: float,
    watch_s: float = WATCH_S,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Wait until the writer that beats for launch `number` is gone; False if it isn't after `deadline_s`
    seconds.

    A writer on a machine that can't be seen from here counts as gone once its counter stood still for
    `watch_s`.
    """
    last = read_beat(store, number)
    deadline = time.monotonic() + deadline_s
    said = False
    while last:
        alive = process_alive(last)
        if alive is False or (alive is None and last.get("phase") != DRAINING):
            return True
        if time.monotonic() >= deadline:
            return False
        if not said:
            say(
                f"waiting for the writer of launch {number} (host {_text(last.get('host'))}, pid "
                f"{_number(last.get('pid'))}) to finish what it holds, for {deadline_s:.0f} s at most"
            )
            said = True
        if alive is None:
            moved = watch(store, number, last, min(watch_s, deadline_s))
            if moved is None:
                return True
            last = moved
        else:
            time.sleep(_POLL_S / 5)
            last = read_beat(store, number) or last
    return True


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
