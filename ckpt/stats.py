"""What saving has cost so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class SaveCosts:
    """One save. Seconds unless said otherwise.

    stall_s: the training thread inside the call. join_s: waits before an optimizer step. stage_s:
    copying in the background. persist_s: the writer's time. durable_s: from the call until it was
    committed. bytes: of this rank's shard.
    """

    step: int
    attempt: str
    stall_s: float = 0.0
    join_s: float = 0.0
    stage_s: float = 0.0
    persist_s: float = 0.0
    durable_s: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class SaveStats:
    """All saves of this launch: sums of their costs, and counts.

    begun = committed + failed + voided + backlog. failed: could not be written. voided: the state
    changed while it was copied, or the ranks could not go together. skipped: due while none of the
    slots was free. last: the last committed one.
    """

    begun: int = 0
    committed: int = 0
    failed: int = 0
    voided: int = 0
    skipped: int = 0
    backlog: int = 0
    bytes: int = 0
    stall_s: float = 0.0
    join_s: float = 0.0
    stage_s: float = 0.0
    persist_s: float = 0.0
    durable_s: float = 0.0
    last: SaveCosts | None = None


@dataclass
class Tally:
    """The statistics as several threads write them."""

    _now: SaveStats = field(default_factory=SaveStats)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def now(self) -> SaveStats:
        """A snapshot."""
        return self._now

    def add(self, **counts: float) -> None:
        """Add to counters."""
        with self._lock:
            self._now = replace(self._now, **{k: getattr(self._now, k) + v for k, v in counts.items()})

    def committed(self, costs: SaveCosts) -> None:
        """Count a committed save."""
        self.add(
            committed=1,
            backlog=-1,
            bytes=costs.bytes,
            stage_s=costs.stage_s,
            persist_s=costs.persist_s,
            durable_s=costs.durable_s,
        )
        with self._lock:
            self._now = replace(self._now, last=costs)
