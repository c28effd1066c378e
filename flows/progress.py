"""The story of a launch, told from its events: the live line, and the numbers of the closing summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """What is known of a launch so far. `hear` takes one event and returns a line worth keeping, or None."""

    began: float
    max_steps: int
    step: int = 0
    loss: float | None = None
    speed: float | None = None
    params: int | None = None
    launch: int = 0
    restored: int | None = None
    first_step_s: float | None = None
    saves: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("committed", "failed", "skipped"), 0)
    )
    saved: dict[str, Any] = field(default_factory=dict)
    # The newest statistics of saving, of each launch.
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)
    saving: int | None = None
    val_loss: float | None = None
    end: dict[str, Any] | None = None

    def hear(self, event: dict[str, Any]) -> str | None:
        """Take one event of the trainer."""
        kind = event.get("event")
        reader = getattr(self, f"_hear_{kind}", None)
        return reader(event) if reader else None

    def _hear_start(self, event: dict[str, Any]) -> None:
        self.launch = event.get("launch") or self.launch
        self.params = event.get("params")
        self.max_steps = event.get("max_steps") or self.max_steps

    def _hear_restored(self, event: dict[str, Any]) -> str:
        self.restored = self.step = event["step"]
        for line in event.get("skipped") or []:
            self.saved.setdefault("bad", []).append(line)
        return f"resume from step {event['step']} (verified)"

    def _hear_step(self, event: dict[str, Any]) -> str | None:
        first = self.first_step_s is None
        if first:
            self.first_step_s = event.get("t", time.monotonic()) - self.began
        self.step = event["step"]
        self.loss = event.get("loss", self.loss)
        self.speed = event.get("samples_per_s", self.speed)
        return f"first step after {self.first_step_s:.1f} s" if first else None

    def _hear_save(self, event: dict[str, Any]) -> str | None:
        state = event["state"]
        if state == "begun":
            self.saving = event["step"]
        elif state in self.saves:
            self.saves[state] += 1
            self.saving = None
        if event.get("stats"):
            self.stats[self.launch] = event["stats"]
        if state in ("durable", "committed"):
            if event["step"] != self.saved.get("step"):
                self.saved = {k: v for k, v in self.saved.items() if k == "bad"}
            self.saved |= {k: v for k, v in event.items() if v is not None and k != "stats"}
        if state == "failed":
            return f"save of step {event['step']} failed: {event.get('error') or 'no reason given'}"
        return None

    def _hear_eval(self, event: dict[str, Any]) -> None:
        self.val_loss = event.get("val_loss")

    def _hear_end(self, event: dict[str, Any]) -> None:
        self.end = event
        if event.get("stats"):
            self.stats[self.launch] = event["stats"]
        if event.get("step") is not None:
            self.step = event["step"]

    def cost(self, name: str) -> float:
        """A number of the statistics, summed over all launches."""
        return sum(float(stats.get(name) or 0) for stats in self.stats.values())

    def line(self) -> str:
        """`step 60/200  loss 2.31  412 samples/s  | saved 60, durable 0.4 s, stall 0.6 ms`"""
        parts = [f"step {self.step}/{self.max_steps}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3g}")
        if self.speed:
            parts.append(f"{self.speed:.0f} samples/s")
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3g}")
        text = "  ".join(parts)
        if self.saved.get("step") is not None:
            text += f"  | saved {self.saved['step']}"
            if self.saved.get("durable_s") is not None:
                text += f", durable {self.saved['durable_s']:.1f} s"
            if self.saved.get("stall_s") is not None:
                text += f", stall {self.saved['stall_s'] * 1e3:.1f} ms"
        elif self.saving is not None:
            text += f"  | saving {self.saving}"
        return text


def count(number: int) -> str:
    """A number of parameters in words: 2.4 M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
