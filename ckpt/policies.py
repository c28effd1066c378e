"""When to save and what to keep: small rules over immutable facts, combined by `Any` and `All`.

A save policy has `should_save(now: Now) -> bool`; it is asked on rank 0 only, at step boundaries.
A keep policy has `keep(history) -> set of attempt names` and is asked after a commit; what it does
not keep is removed, except the newest checkpoint and pinned ones. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ckpt.checkpoint import Fact


@dataclass(frozen=True)
class Now:
    """What a save policy may look at. All times in seconds."""

    step: int
    previous_step: int | None = None  # of the previous call of `step`; the restored step for the first one
    since_last_s: float = 0.0  # since the last save began, or the launch did
    in_flight: bool = False  # a save is not durable yet
    cost_s: float | None = (
        None  # what the last save cost training at most: stall + join + staging; None before the first
    )
    durable_s: float | None = None  # from the last save's begin to its commit


class SavePolicy(Protocol):
    """Decides when to save."""

    def should_save(self, now: Now) -> bool:
        """Whether to begin a save at this step boundary."""


class KeepPolicy(Protocol):
    """Decides which checkpoints stay."""

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names to keep out of the run's whole history of commits, newest first by lineage."""


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")


@dataclass(frozen=True)
class EverySteps:
    """At every multiple of `every` steps, also when a call jumps over it."""

    every: int

    def __post_init__(self) -> None:
        _positive("EverySteps.every", self.every)

    def should_save(self, now: Now) -> bool:
        """True when a multiple of `every` lies after the previous step and not after this one."""
        if now.previous_step is None:
            return now.step > 0 and now.step % self.every == 0
        return now.previous_step // self.every < now.step // self.every


@dataclass(frozen=True)
class EveryMinutes:
    """When `minutes` have passed since the last save began."""

    minutes: float

    def __post_init__(self) -> None:
        _positive("EveryMinutes.minutes", self.minutes)

    def should_save(self, now: Now) -> bool:
        """True when the time has passed."""
        return now.since_last_s >= self.minutes * 60


@dataclass(frozen=True)
class OverheadBudget:
    """As often as `percent` of training time pays for, and never before the last save is durable."""

    percent: float = 1.0
    first_s: float = 60.0  # the first save, before any cost is known

    def __post_init__(self) -> None:
        _positive("OverheadBudget.percent", self.percent)
        _positive("OverheadBudget.first_s", self.first_s)

    def should_save(self, now: Now) -> bool:
        """True when the measured cost of a save fits the budget again."""
        if now.in_flight:
            return False
        if now.cost_s is None:
            return now.since_last_s >= self.first_s
        return now.since_last_s >= max(now.cost_s * 100 / self.percent, now.durable_s or 0.0)


@dataclass(frozen=True)
class YoungDaly:
    """At the interval that wastes least when something fails every `mtbf_hours` (Daly's formula)."""

    mtbf_hours: float
    first_s: float = 60.0

    def __post_init__(self) -> None:
        _positive("YoungDaly.mtbf_hours", self.mtbf_hours)
        _positive("YoungDaly.first_s", self.first_s)

    def interval_s(self, cost_s: float) -> float:
        """Seconds between saves when one costs training `cost_s` seconds."""
        mtbf = self.mtbf_hours * 3600
        if cost_s >= 2 * mtbf:
            return mtbf
        ratio = cost_s / (2 * mtbf)
        return math.sqrt(2 * cost_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s

    def should_save(self, now: Now) -> bool:
        """True when the interval for the measured cost has passed and the last save is durable."""
        if now.in_flight:
            return False
        if now.cost_s is None:
            return now.since_last_s >= self.first_s
        return now.since_last_s >= max(self.interval_s(now.cost_s), now.durable_s or 0.0)


@dataclass(frozen=True)
class Continuous:
    """As soon as the last save is durable, but not more often than every `min_s` seconds."""

    min_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_s < math.inf:
            raise ValueError(f"Continuous.min_s must be 0 or more seconds, not {self.min_s!r}")

    def should_save(self, now: Now) -> bool:
        """True when nothing is in flight and the minimum interval has passed."""
        return not now.in_flight and now.since_last_s >= self.min_s


@dataclass(frozen=True)
class KeepLast:
    """The newest `n`; None or -1 keeps all."""

    n: int | None = 3

    def __post_init__(self) -> None:
        if self.n is not None and (
            isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < -1 or self.n == 0
        ):
            raise ValueError(
                f"KeepLast.n must be 1 or more, or -1 or null to keep all, not {self.n!r}: "
                "a run without its newest checkpoint can't be resumed"
            )

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names of the newest `n`."""
        n = None if self.n in (None, -1) else self.n
        return {fact.attempt for fact in history[:n]}


@dataclass(frozen=True)
class KeepEvery:
    """Those at multiples of `steps`, for ever."""

    steps: int

    def __post_init__(self) -> None:
        _positive("KeepEvery.steps", self.steps)

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names at multiples of `steps`."""
        return {fact.attempt for fact in history if fact.step % self.steps == 0}


@dataclass(frozen=True)
class KeepBest:
    """The best `n` of the whole history by a metric, lowest (`min`) or highest (`max`) first.

    NaN, infinity and a missing metric are never best and never in the way of another.
    """

    metric: str
    direction: str
    n: int = 1

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise ValueError(
                f"KeepBest.direction must be 'min' or 'max', not {self.direction!r}: "
                f"say whether a lower or a higher {self.metric!r} is better"
            )
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"KeepBest.n must be 1 or more, not {self.n!r}")

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names of the best `n`; of equal ones the newest."""
        sign = 1.0 if self.direction == "max" else -1.0
        ranked = [
            (sign * value, fact.launch, fact.step, fact.attempt)
            for fact in history
            if (value := _finite((fact.metrics or {}).get(self.metric))) is not None
        ]
        return {attempt for *_, attempt in sorted(ranked, reverse=True)[: self.n]}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


@dataclass(frozen=True, init=False)
class Any:
    """Save if any of the policies would; keep what any of them keeps."""

    policies: tuple[object, ...]

    def __init__(self, *args: object, policies: Sequence[object] = ()) -> None:
        object.__setattr__(self, "policies", _combined("Any", (*args, *policies)))

    def should_save(self, now: Now) -> bool:
        """True if any policy says so."""
        return any(p.should_save(now) for p in self.policies)  # type: ignore[attr-defined]

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The union of what the policies keep."""
        return set().union(*(p.keep(history) for p in self.policies))  # type: ignore[attr-defined]


@dataclass(frozen=True, init=False)
class All:
    """Save if all of the policies would; keep what all of them keep."""

    policies: tuple[object, ...]

    def __init__(self, *args: object, policies: Sequence[object] = ()) -> None:
        object.__setattr__(self, "policies", _combined("All", (*args, *policies)))

    def should_save(self, now: Now) -> bool:
        """True if every policy says so."""
        return all(p.should_save(now) for p in self.policies)  # type: ignore[attr-defined]

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The intersection of what the policies keep."""
        return set.intersection(*(p.keep(history) for p in self.policies))  # type: ignore[attr-defined]


def _combined(name: str, policies: tuple[object, ...]) -> tuple[object, ...]:
    if not policies:
        raise ValueError(f"{name} needs at least one policy")
    for policy in policies:
        if not (hasattr(policy, "should_save") or hasattr(policy, "keep")):
            raise ValueError(f"{name} combines policies; {policy!r} is none")
    return policies
