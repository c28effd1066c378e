"""Whether memory and disk can hold what the configuration asks for, checked before training is hurt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.errors import StorageError
from ckpt.store import Store

_GIB = 1 << 30
_MIB = 1 << 20
_TIGHT = 0.8


class Verdict(NamedTuple):
    """`refusal`: it can't work; `warning`: it may not last. Both with numbers, or None."""

    refusal: str | None
    warning: str | None


def check_memory(needed: int, available: int | None = None) -> Verdict:
    """Whether `needed` more bytes of staging memory fit on this host, within the cgroup's limit."""
    free = available_memory() if available is None else available
    if free is None or needed <= _TIGHT * free:
        return Verdict(None, None)
    text = f"staging takes {_size(needed)} of memory per rank, of which {_size(free)} is available"
    if needed > free:
        return Verdict(f"{text}: use fewer slots, a smaller state or a larger machine", None)
    return Verdict(None, f"{text}: little is left for training")


def check_disk(store: Store, one: int, kept: int | None) -> Verdict:
    """Whether checkpoints of `one` byte size each fit beside what is there; `kept` of them stay (None:
    all).
    """
    free = store.free()
    if free is None or one <= 0:
        return Verdict(None, None)
    text = f"a checkpoint takes {_size(one)}, and {_size(free)} is free at {store.uri}"
    if one > free:
        return Verdict(f"{text}: free some space or choose another place", None)
    if kept is None:
        warning = (
            f"{text}: nothing bounds how many are kept, room is for {free // one}"
            if free < 10 * one
            else None
        )
    else:
        # Retention removes the oldest only when the newest is committed, so one more than is kept exists.
        needed = (kept + 1) * one
        warning = f"{text}: keeping {kept} needs {_size(needed)}" if free < needed else None
    return Verdict(None, warning)


def settle(verdict: Verdict) -> str | None:
    """Raise StorageError for a refusal; the warning, if any."""
    if verdict.refusal:
        raise StorageError(verdict.refusal)
    return verdict.warning


def foresee(
    state: Mapping[str, Any], store: Store, keep: object, slots: int, say: Callable[[str], None]
) -> None:
    """Say what memory and disk will lack, by an estimate: before the first step nothing is certain."""
    size = estimate(state)
    for verdict in (check_memory(size * slots), check_disk(store, size, kept_by(keep))):
        text = verdict.refusal or verdict.warning
        if text:
            say(f"by an estimate of the state to come, {text}")


def kept_by(keep: object) -> int | None:
    """How many checkpoints a keep policy keeps, None if that has no limit or can't be told."""
    n = getattr(keep, "n", None)
    return n if isinstance(n, int) and n > 0 else None


def available_memory() -> int | None:
    """Bytes that may still be allocated: what the host has available, or less where a cgroup limits it."""
    known = [n for n in (_host_available(), *_cgroup_available()) if n is not None]
    return min(known) if known else None


def _host_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> list[int]:
    """What each limited cgroup on the way up (v2) or the memory controller's (v1) leaves."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder = Path("/sys/fs/cgroup") / path.lstrip("/")
            for place in (folder, *folder.parents):
                found.append(_left(place / "memory.max", place / "memory.current", place / "memory.stat"))
        elif "memory" in controllers.split(","):
            place = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            found.append(_left(*(place / name for name in names)))
    return [n for n in found if n is not None]


def _left(limit: Path, used: Path, stat: Path) -> int | None:
    try:
        most = limit.read_text().strip()
        if most == "max":
            return None
        reclaimable = sum(
            int(line.split()[1])
            for line in stat.read_text().splitlines()
            if line.split()[0] in ("inactive_file", "total_inactive_file")
        )
        return max(0, int(most) - int(used.read_text()) + reclaimable)
    except (OSError, ValueError):
        return None


def estimate(state: Mapping[str, Any]) -> int:
    """Bytes that the state will take once the optimizers have run: tensors now, and Adam's moments to
    come.
    """
    from torch import nn
    from torch.optim import Optimizer

    total = 0
    for thing in state.values():
        if isinstance(thing, nn.Module):
            total += sum(t.nbytes for t in thing.state_dict().values() if hasattr(t, "nbytes"))
        elif isinstance(thing, Optimizer) and not thing.state:
            moments = 2 if "betas" in thing.defaults else 1 if thing.defaults.get("momentum") else 0
            total += moments * sum(
                p.nbytes for g in thing.param_groups for p in g["params"] if p.requires_grad
            )
        elif isinstance(thing, Optimizer):
            total += sum(getattr(v, "nbytes", 0) for slots in thing.state.values() for v in slots.values())
    return total


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.1f} MiB"
