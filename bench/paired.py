"""What saves cost training: windows of steps with a save, each between two without."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.intervals import bootstrap, paired_overheads
from bench.loop import Loop

_PATIENCE = 50


@dataclass(frozen=True)
class Costs:
    """Seconds, one per save: all three that training or the user waits for, and the overhead of each pair.

    extended: save windows that went on because the save was not yet durable. step_s: of control windows.
    """

    stall_s: list[float]
    join_s: list[float]
    durable_s: list[float]
    overhead_s: list[float]
    control_s: list[float]
    extended: int
    step_s: float

    def plain(self) -> dict[str, Any]:
        """As JSON, with the overhead's median and interval."""
        return {**asdict(self), "interval": asdict(bootstrap(self.overhead_s))}


def measure(loop: Loop, pairs: int, window: int) -> Costs:
    """Train `2 * pairs + 1` windows of `window` steps, saving once at the start of every other one.

    Raises what makes a save fail.
    """
    stalls, joins, durables = [], [], []
    controls, saves = [loop.run(window)], []
    extended = 0
    for _ in range(pairs):
        seconds, steps = loop.run(window, save=True), window
        while loop.engine.durable_at() is None and steps < _PATIENCE * window:
            seconds, steps = seconds + loop.run(1), steps + 1
        saved = loop.saved_step
        durable = loop.engine.wait_durable()
        extended += steps > window
        saves.append((seconds, steps))
        stalls.append(loop.stall_s)
        joins.append(loop.join_s)
        durables.append(durable - loop.saved_at)
        loop.engine.discard(saved)
        controls.append(loop.run(window))
    overheads = paired_overheads(controls, saves, window)
    step_s = sum(controls) / len(controls) / window
    return Costs(stalls, joins, durables, overheads, controls, extended, step_s)
