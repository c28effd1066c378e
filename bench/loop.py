"""The training loop that every engine is hooked into in the same way, timed from outside."""

from __future__ import annotations

import time

from bench.engines.base import Engine
from bench.workload import Workload


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

    def run(self, steps: int, save: bool = False) -> float:
        """Train, with `save` saving at the boundary that the first of the steps begins at; the seconds."""
        start = time.monotonic()
        for number in range(steps):
            self._boundary(save and number == 0)
            self.work.forward_backward(self._batch)
            waiting = time.monotonic()
            self.engine.before_step()
            self.join_s += time.monotonic() - waiting
            self.work.update()
            self.step += 1
        self.work.synchronize()
        return time.monotonic() - start

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
