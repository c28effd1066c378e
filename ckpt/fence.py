"""Fencing: the highest launch number owns the run, and whoever has a lower one may no longer write to it."""

from __future__ import annotations

from typing import Any

from ckpt.errors import Corrupt, Fenced, StorageError
from ckpt.names import LAUNCHES, launch_file, parse_launch
from ckpt.sealed import parse_object
from ckpt.store import Store

MAX_RECORD = 4 << 20
"""Bytes that a launch's file may have."""


def launch_numbers(store: Store) -> list[int]:
    """The numbers of all launches, ascending, at the price of one listing. Raises StorageError."""
    numbers = (parse_launch(entry.name) for entry in store.list(LAUNCHES) if not entry.is_dir)
    return sorted(number for number in numbers if number is not None)


def assert_launched(store: Store, number: int) -> None:
    """Raise StorageError unless launch `number` is listed in the run, as the one that asks has to be.

    A run that was removed lists nothing, and a store may answer a failed listing with an empty one: neither
    says that nobody else has taken the run over.
    """
    if number not in launch_numbers(store):
        raise StorageError(
            f"{store.uri}/{launch_file(number)}, the file of the launch that writes, is not there: the run "
            "was removed or moved, or its storage does not list it"
        )


def assert_not_fenced(store: Store, number: int) -> None:
    """Raise Fenced if a launch higher than `number` has been opened; StorageError if that can't be seen."""
    numbers = launch_numbers(store)
    if not numbers or numbers[-1] <= number:
        return
    info = read_record(store, launch_file(numbers[-1])) or {}
    raise Fenced(
        f"launch {number} has been overtaken by launch {numbers[-1]} (host {info.get('host')}, pid "
        f"{info.get('pid')}): it may no longer write to {store.uri}"
    )


def read_record(store: Store, key: str) -> dict[str, Any] | None:
    """A small JSON record; None if it is absent, torn or no object. Raises StorageError."""
    try:
        return parse_object(store.read(key, MAX_RECORD), key)
    except (FileNotFoundError, Corrupt):
        return None
