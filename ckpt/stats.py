"""What saving has cost so far."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(kw_only=True)
class Costs:
    """What saving takes. Seconds unless said otherwise.

    stall_s: the training thread inside the call. join_s: waits before an optimizer step. stage_s:
    copying in the background. persist_s: the writer's time. durable_s: from the call until it was
    committed. bytes: of this rank's shard.
    """

    stall_s: float = 0.0
    join_s: float = 0.0
    stage_s: float = 0.0
    persist_s: float = 0.0
    durable_s: float = 0.0
    bytes: int = 0

    @property
    def held_s(self) -> float:
        """What the training thread lost for sure: stall and join."""
        return self.stall_s + self.join_s

    def amounts(self) -> dict[str, Any]:
        """The costs alone, by name."""
        return {name: getattr(self, name) for name in _AMOUNTS}


_AMOUNTS = tuple(each.name for each in fields(Costs))
# Lost at once and whatever becomes of the save; all else counts once it is committed.
_AT_ONCE = ("stall_s", "join_s")


@dataclass(kw_only=True)
class SaveCosts(Costs):
    """One save."""

    step: int
    attempt: str


@dataclass(kw_only=True)
class SaveStats(Costs):
    """All saves of this launch: sums of their costs, and counts. A snapshot.

    begun = committed + failed + voided + backlog. failed: could not be written. voided: the state
    changed while it was copied, or the ranks could not go together. skipped: due while none of the
    slots was free. last: the last committed one. On rank 0 also trained_s, the seconds from the first
    step to the last, and slowed_s: by how much longer than usual the steps took beside which a save
    was under way, stall and join left out; an estimate, below 0 where it is all noise.
    """

    begun: int = 0
    committed: int = 0
    failed: int = 0
    voided: int = 0
    skipped: int = 0
    backlog: int = 0
    trained_s: float = 0.0
    slowed_s: float = 0.0
    last: SaveCosts | None = None

    @property
    def lost_s(self) -> float:
        """What training lost: stall and join, and by estimate what its steps took longer."""
        return self.held_s + max(0.0, self.slowed_s)

    @property
    def overhead_percent(self) -> float | None:
        """The share of training that stall and join took; None before the second step, and on other ranks."""
        return 100 * self.held_s / self.trained_s if self.trained_s else None


class Tally:
    """The statistics as several threads write them.

    Training adds to them at every step, when all of this is out of the processor's cache: a snapshot is
    made for whoever asks for one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {each.name: each.default for each in fields(SaveStats)}
        self._lock = threading.Lock()

    @property
    def now(self) -> SaveStats:
        """A snapshot."""
        with self._lock:
            return SaveStats(**self._counts)

    def get(self, name: str) -> Any:
        """One of the statistics."""
        return self._counts[name]

    @property
    def held_s(self) -> float:
        """`SaveStats.held_s`."""
        return float(self._counts["stall_s"] + self._counts["join_s"])

    def add(self, **counts: float) -> None:
        """Add to counters."""
        with self._lock:
            self._add(counts)

    def committed(self, costs: SaveCosts) -> None:
        """Count a committed save."""
        later = {name: value for name, value in costs.amounts().items() if name not in _AT_ONCE}
        with self._lock:
            self._add({"committed": 1, "backlog": -1, **later})
            self._counts["last"] = costs

    def _add(self, counts: Mapping[str, float]) -> None:
        for name, more in counts.items():
            self._counts[name] += more
