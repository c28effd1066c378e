"""Pins: names that keep a checkpoint from being pruned, for good (a tag) or until a deadline (a reader's
lease).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckpt.checkpoint import Checkpoint
from ckpt.errors import Corrupt, NotCommitted, StateError
from ckpt.names import DOOMED, MANIFEST, PINS, is_safe, parse_attempt
from ckpt.run import Run
from ckpt.sealed import canonical, parse_object
from ckpt.store import Store

_MAX_PIN = 64 << 10
_SUFFIX = ".json"


@dataclass(frozen=True)
class Pin:
    """A name for a checkpoint that keeps it; `deadline` in seconds since the epoch, None for a tag."""

    name: str
    attempt: str
    step: int
    launch: int
    deadline: float | None

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and time.time() > self.deadline


def pin(run: Run, name: str, checkpoint: Checkpoint, deadline_s: float | None = None) -> Pin:
    """Keep a checkpoint under `name`, for `deadline_s` seconds or for good; a name in use moves.

    Raises NotCommitted if the checkpoint isn't committed or is just being pruned, StateError for a name that
    is not made of `[A-Za-z0-9._-]` or a checkpoint of another run, StorageError.
    """
    key = _key(name)
    if checkpoint.run_uri != run.uri:
        raise StateError(f"{checkpoint.uri} is not a checkpoint of {run.uri}")
    made = Pin(
        name,
        checkpoint.attempt,
        checkpoint.step,
        checkpoint.launch,
        None if deadline_s is None else time.time() + deadline_s,
    )
    before = _try_read(run.store, name)
    run.store.make_dir(PINS)
    content = {"format": 1, "attempt": made.attempt, "deadline": made.deadline}
    run.store.put(key, canonical(content))
    # A pruner marks its victim before it looks for pins, and this looks for the mark after it has pinned:
    # whichever of the two comes later sees the other.
    doomed = run.store.size(f"{made.attempt}/{DOOMED}") is not None
    if doomed or not run.store.size(f"{made.attempt}/{MANIFEST}"):
        if before is not None:
            run.store.put(key, before)
        else:
            run.store.delete(key)
        state = "is just being pruned" if doomed else "is not committed"
        raise NotCommitted(f"{checkpoint.uri} {state}: it can't be kept as {name!r}")
    return made


def unpin(run: Run, name: str) -> bool:
    """Let go of a pinned checkpoint; False if nothing had that name. Raises StateError, StorageError."""
    key = _key(name)
    if run.store.size(key) is None:
        return False
    run.store.delete(key)
    return True


def pins(run: Run) -> list[Pin]:
    """All pins of a run by name, expired ones included. Raises Corrupt if one can't be read, StorageError."""
    return read_pins(run.store)


def read_pins(store: Store) -> list[Pin]:
    """As `pins`, of the run in `store`."""
    names = [entry.name for entry in store.list(PINS) if not entry.is_dir and entry.name.endswith(_SUFFIX)]
    found = (_try_read(store, name.removesuffix(_SUFFIX)) for name in sorted(names))
    return [
        _parse(name.removesuffix(_SUFFIX), data)
        for name, data in zip(sorted(names), found, strict=True)
        if data is not None
    ]


def read_pin(run: Run, name: str) -> Pin:
    """One pin. Raises NotCommitted if none has that name, Corrupt if it can't be read, StorageError."""
    data = _try_read(run.store, name)
    if data is None:
        there = [item.name for item in pins(run)]
        raise NotCommitted(f"{run.uri} has no tag {name!r}; there are {', '.join(there) or 'none'}")
    return _parse(name, data)


def pinned(store: Store) -> set[str]:
    """The attempts that some pin holds now. Corrupt if a pin can't be read: then nothing may be pruned."""
    return {item.attempt for item in read_pins(store) if not item.expired}


def _key(name: str) -> str:
    if not is_safe(name):
        raise StateError(f"{name!r} can't be a tag: use letters, digits, '.', '_' and '-' only")
    return f"{PINS}/{name}{_SUFFIX}"


def _try_read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(_key(name), _MAX_PIN)
    except FileNotFoundError:
        return None


def _parse(name: str, data: bytes) -> Pin:
    what = f"the pin {name}"
    content = parse_object(data, what)
    attempt, deadline = content.get("attempt"), content.get("deadline")
    named = parse_attempt(attempt) if isinstance(attempt, str) else None
    if named is None or not (deadline is None or type(deadline) in (int, float)):
        raise Corrupt(f"{what} doesn't say which checkpoint it keeps, and until when: correct or delete it")
    return Pin(name, str(attempt), *named, deadline)
