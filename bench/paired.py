"""What saves cost training: windows of steps with a save, each between two without."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench import quiet
from bench.intervals import bootstrap, paired_overheads
from bench.loop import Loop
from bench.places import Place


@dataclass(frozen=True)
class Costs:
    """Seconds, one per save.

    stall_s, join_s, durable_s: what training or the user waits for. overhead_s, steal_s: what the save's
    window took beyond the controls around it, of time and of the host's share of the processors.
    writeback_s: until the machine had written back what the engine left in memory; in no window.
    control_s: each control window. extended: save windows that went on because the save was not yet durable.
    step_s: of control windows.
    """

    stall_s: list[float]
    join_s: list[float]
    durable_s: list[float]
    overhead_s: list[float]
    steal_s: list[float]
    writeback_s: list[float]
    control_s: list[float]
    extended: int
    step_s: float

    def plain(self) -> dict[str, Any]:
        """As JSON, with the overhead's median and interval."""
        return {**asdict(self), "interval": asdict(bootstrap(self.overhead_s))}


def measure(loop: Loop, pairs: int, window: int, folder: Place) -> Costs:
    """Train `2 * pairs + 1` windows of `window` steps, saving once at the start of every other one.

    After each save, training goes on unmeasured until nothing of it is going on any more.
    Raises what makes a save fail.
    """
    stalls, joins, durables, written_back = [], [], [], []
    controls, saves = [loop.control(window)], []
    for _ in range(pairs):
        saves.append(loop.save(window))
        durable = loop.engine.wait_durable()
        stalls.append(loop.stall_s)
        joins.append(loop.join_s)
        durables.append(durable - loop.saved_at)
        written_back.append(quiet.settle(loop, folder))
        controls.append(loop.control(window))
    seconds = [control.seconds for control in controls]
    return Costs(
        stalls,
        joins,
        durables,
        paired_overheads(seconds, [(save.seconds, save.steps) for save in saves], window),
        paired_overheads([c.steal_s for c in controls], [(s.steal_s, s.steps) for s in saves], window),
        written_back,
        seconds,
        extended=sum(save.steps > window for save in saves),
        step_s=sum(seconds) / len(seconds) / window,
    )
