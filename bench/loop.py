"""The training loop that every engine is hooked into in the same way, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.engines.base import Engine
from bench.workload import Workload

_PATIENCE = 50


@dataclass(frozen=True)
class Window:
    """Some steps of training. steal_s: what the host took from all of this machine's processors meanwhile."""

    seconds: float
    steps: int
    steal_s: float


class Loop:
    """Trains `work` and lets `engine` save it. All times in seconds on the monotonic clock.

    stall_s: inside the last call to save. join_s: waits before optimizer steps since then.
    """

    def __init__(self, work: Workload, engine: Engine, batch: int) -> None:
        self.work = work
        self.engine = engine
        self.stall_s = 0.0
        self.join_s = 0.0
        self.saved_at = 0.0
        self.step = 0
        self.saved_step = 0
        self._batch = batch

    def run(self, steps: int, save: bool = False, after_call: Callable[[], None] | None = None) -> float:
        """Train, with `save` saving at the boundary that the first of the steps begins at; the seconds.

        `after_call` is called once, when training may go on after that boundary.
        """
        start = time.monotonic()
        for number in range(steps):
            self._boundary(save and number == 0)
            if after_call is not None and number == 0:
                after_call()
            self.work.forward_backward(self._batch)
            waiting = time.monotonic()
            self.engine.before_step()
            self.join_s += time.monotonic() - waiting
            self.work.update()
            self.step += 1
        self.work.synchronize()
        return time.monotonic() - start

    def control(self, steps: int) -> Window:
        """A window without a save."""
        stolen = steal_s()
        seconds = self.run(steps)
        return Window(seconds, steps, steal_s() - stolen)

    def save(self, steps: int) -> Window:
        """A window that begins with a save and goes on until that is durable. Raises what makes it fail."""
        stolen = steal_s()
        seconds, done = self.run(steps, save=True), steps
        while self.engine.durable_at() is None and done < _PATIENCE * steps:
            seconds, done = seconds + self.run(1), done + 1
        return Window(seconds, done, steal_s() - stolen)

    def wait_durable(self) -> float:
        """Hold training up until the last save is durable; the seconds."""
        start = time.monotonic()
        self.engine.wait_durable()
        return time.monotonic() - start

    def _boundary(self, save: bool) -> None:
        if not save:
            self.engine.skip(self.step)
            return
        self.join_s = 0.0
        self.saved_step = self.step
        self.saved_at = time.monotonic()
        self.engine.save(self.step)
        self.stall_s = time.monotonic() - self.saved_at


def steal_s() -> float:
    """Seconds that a virtual machine's processors were ready but not run by the host, since it started.

    Counted in hundredths, all processors together; 0 on a machine that does not count it.
    """
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(fields[8]) / 100 if len(fields) > 8 else 0.0
