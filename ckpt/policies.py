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
    cost_s: float | None = None  # what a save costs training, by the last few; None before the first commit
    durable_s: float | None = None  # from the last save's begin to its commit
    spent_s: float = 0.0  # what saving has cost training so far, in this launch
    trained_s: float = math.inf  # how long this launch has trained; infinite where nobody knows
    failed: bool = False  # the last save could not be committed


# OverheadBudget's longest pause, in usual ones.
_LONGEST_PAUSE = 4.0
# Continuous waits after a failure, or it would use up its tries at once.
_AFTER_FAILURE_S = 10.0


class SavePolicy(Protocol):
    """Decides when to save."""

    def should_save(self, now: Now) -> bool:
        """Whether to begin a save at this step boundary."""


class KeepPolicy(Protocol):
    """Decides which checkpoints stay."""

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names to keep out of the run's whole history of commits, newest first by lineage."""


def _whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}")


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")


@dataclass(frozen=True)
class EverySteps:
    """At every multiple of `every` steps, also when a call jumps over it."""

    every: int

    def __post_init__(self) -> None:
        _whole("EverySteps.every", self.every)

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
    """As often as `percent` of training time pays for, and never before the last save is durable.

    What was spent beyond that is saved up for again, but no pause is longer than four usual ones: one
    save that met a bad moment must not leave training unprotected for hours.
    """

    percent: float = 1.0
    first_s: float = 60.0  # the first save, before any cost is known; also the pause after a failed one

    def __post_init__(self) -> None:
        _positive("OverheadBudget.percent", self.percent)
        if self.percent > 100:
            raise ValueError(f"OverheadBudget.percent must be at most 100, not {self.percent!r}")
        _positive("OverheadBudget.first_s", self.first_s)

    def should_save(self, now: Now) -> bool:
        """True when the measured cost of a save fits the budget again."""
        if now.cost_s is None:
            return _may_follow(now, self.first_s, self.first_s)
        usual = now.cost_s * 100 / self.percent
        paid = (now.spent_s + now.cost_s) * 100 / self.percent <= now.trained_s
        return _may_follow(now, usual if paid else _LONGEST_PAUSE * usual, self.first_s)


@dataclass(frozen=True)
class YoungDaly:
    """At the interval that wastes least when something fails every `mtbf_hours` (Young's formula).

    What is wasted: each save's cost, and after a failure the training since the last save.
    """

    mtbf_hours: float
    first_s: float = 60.0  # the first save, before any cost is known; also the pause after a failed one

    def __post_init__(self) -> None:
        _positive("YoungDaly.mtbf_hours", self.mtbf_hours)
        _positive("YoungDaly.first_s", self.first_s)

    def interval_s(self, cost_s: float) -> float:
        """Seconds from one save's begin to the next one's when a save costs training `cost_s` seconds.

        sqrt(2 cost MTBF), and never above the MTBF. For costs up to a tenth of the MTBF no other interval
        wastes 1 % less, so Daly's further terms are left out.
        """
        mtbf = self.mtbf_hours * 3600
        return min(math.sqrt(2 * cost_s * mtbf), mtbf)

    def should_save(self, now: Now) -> bool:
        """True when the interval for the measured cost has passed and the last save is durable."""
        interval = self.first_s if now.cost_s is None else self.interval_s(now.cost_s)
        return _may_follow(now, interval, self.first_s)


@dataclass(frozen=True)
class Continuous:
    """As soon as the last save is durable, but not more often than every `min_s` seconds."""

    min_s: float = 0.0

    def __post_init__(self) -> None:
        number = isinstance(self.min_s, int | float) and not isinstance(self.min_s, bool)
        if not number or not 0 <= self.min_s < math.inf:
            raise ValueError(f"Continuous.min_s must be 0 or more seconds, not {self.min_s!r}")

    def should_save(self, now: Now) -> bool:
        """True when nothing is in flight and the minimum interval has passed."""
        return _may_follow(now, self.min_s, _AFTER_FAILURE_S)


def _may_follow(now: Now, interval_s: float, after_failure_s: float) -> bool:
    """Whether a save may begin `interval_s` after the last one did: none is in flight, storage that
    failed gets a rest, and no interval is shorter than the last save took to be durable.
    """
    least = max(interval_s, now.durable_s or 0.0, after_failure_s if now.failed else 0.0)
    return not now.in_flight and now.since_last_s >= least


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

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever given up, so that nobody need look at the history."""
        return self.n in (None, -1)

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempt names of the newest `n`."""
        return {fact.attempt for fact in history[: None if self.keeps_all else self.n]}


@dataclass(frozen=True)
class KeepEvery:
    """Those at multiples of `steps`, for ever."""

    steps: int

    def __post_init__(self) -> None:
        _whole("KeepEvery.steps", self.steps)

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
