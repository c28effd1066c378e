"""One attempt at a checkpoint, as the trainer knows it."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.guard import Taken
from ckpt.planning import Plan
from ckpt.stats import Costs, SaveCosts


def _utc_now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


@dataclass(eq=False)
class Attempt(Costs):
    """Written by the training thread until it is handed over, then by the staging and the settling thread.

    movable: the optimizer may move (on CUDA after `Stage.join_device`). staged: nothing reads the
    live state any more. done: it has ended and its slot is free. problem: why it can't be
    committed, with its kind in front: "failed", "changed" (the state, while it was copied) or
    "replan" (the structure, before).
    """

    name: str
    step: int
    slot: int
    plan: Plan | None = None
    part: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    lead: Callable[[], dict[str, Any]] | None = None
    taken: Taken | None = None
    created: str = field(default_factory=_utc_now)
    begun: float = field(default_factory=time.monotonic)
    problem: str | None = None
    durable_at: float | None = None
    committed_at: float | None = None
    commit_sent: bool = False
    reported: bool = False
    reported_at: float = 0.0
    verdict_at: float | None = None
    released: bool = False
    committed: bool = False
    movable: threading.Event = field(default_factory=threading.Event)
    staged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def go_wrong(self, kind: str, text: str) -> None:
        """Make it void; the first cause stays."""
        if self.problem is None:
            self.problem = f"{kind}: {text}"

    def costs(self) -> SaveCosts:
        """What it has cost so far."""
        durable = (self.committed_at or time.monotonic()) - self.begun
        return SaveCosts(step=self.step, attempt=self.name, **self.amounts() | {"durable_s": durable})

    def early_costs(self) -> dict[str, Any]:
        """What the manifest says of its costs: what is known once the copy is sealed.

        A join that has not begun by then finds nothing to wait for.
        """
        return {name: self.amounts()[name] for name in ("stall_s", "join_s", "stage_s", "bytes")}
