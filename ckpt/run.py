"""Opening a run: the folder that holds its checkpoints, and the file that says which run it is."""

from __future__ import annotations

import datetime as dt
import difflib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointError, Corrupt, NewerFormat, NotCommitted, StorageError
from ckpt.names import LAUNCHES, RUN_FILE, parse_attempt, split_checkpoint
from ckpt.sealed import canonical, parse_object, signing_key
from ckpt.store import Store, open_store
from ckpt.stores.addresses import name_of, parent_of
from ckpt.values import encode

FORMAT = 1
MAX_RUN_FILE = 1 << 20
_NAMED = 20
_OWN_KEYS = ("format", "id", "created", "name")


@dataclass
class Run:
    """An opened run; `takeover` allows a new launch although the last one still lives.

    `info` is all of `run.json`, which never changes once made.
    """

    uri: str
    store: Store = field(repr=False)
    name: str
    id: str
    info: dict[str, Any]
    takeover: bool = False
    signing_key: bytes | None = field(default=None, repr=False)


def open_run(
    uri: str, create: bool = True, takeover: bool = False, info: Mapping[str, Any] | None = None
) -> Run:
    """Open the run at `uri`, and make it first if there is none and `create` is set.

    `info` is stored in a new run's `run.json`; an existing run keeps what it has. Opening takes no lock and
    starts no launch. Raises NotCommitted if there is no run, Corrupt or NewerFormat if `run.json` can't be
    used, StorageError if the address makes no sense or the storage fails, StateError for `info` that is not
    plain.
    """
    store = open_store(uri)
    key = signing_key()
    inside = split_checkpoint(store.uri)
    if inside is not None:
        raise StorageError(f"{store.uri} is the folder of a checkpoint: open its run, {inside[0]}")
    found = read_run_file(store)
    if found is None:
        if not create:
            raise NotCommitted(_no_run(store))
        found = _make(store, info or {})
    return Run(store.uri, store, name_of(store.uri), found["id"], found, takeover, key)


def read_run_file(store: Store) -> dict[str, Any] | None:
    """The checked content of `run.json`, None if there is none. Raises Corrupt, NewerFormat, StorageError."""
    try:
        data = store.read(RUN_FILE, MAX_RUN_FILE)
    except FileNotFoundError:
        return None
    what = f"{store.uri}/{RUN_FILE}"
    try:
        found = parse_object(data, what)
    except Corrupt as error:
        advice = "if making this run was interrupted and it holds no checkpoint, delete it"
        raise Corrupt(f"{error}; {advice}") from None
    version, run_id = found.get("format"), found.get("id")
    if type(version) is int and version > FORMAT:
        raise NewerFormat(
            f"{what} has format {version}, and this version reads up to {FORMAT}: "
            f"update the software that reads it"
        )
    if version != FORMAT or not isinstance(run_id, str) or not 0 < len(run_id) <= 200:
        raise Corrupt(f"{what} doesn't say which run this is")
    return found


def _make(store: Store, info: Mapping[str, Any]) -> dict[str, Any]:
    taken = [key for key in info if key in _OWN_KEYS]
    if taken:
        raise StorageError(f"{RUN_FILE} has its own {', '.join(taken)}: name that information otherwise")
    made = {
        **encode(dict(info), "info", ordered=False),
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "name": name_of(store.uri),
    }
    data = canonical(made)
    if len(data) > MAX_RUN_FILE:
        raise StorageError(f"what {RUN_FILE} is to hold makes {len(data)} bytes; {MAX_RUN_FILE} are taken")
    for entry in store.list():
        if entry.is_dir and (entry.name == LAUNCHES or parse_attempt(entry.name)):
            raise Corrupt(
                f"{store.uri} holds {entry.name} but no {RUN_FILE}: what is there is not made into a new "
                f"run; put the {RUN_FILE} back, or choose another folder"
            )
    store.make_dir("")
    if store.create(RUN_FILE, data):
        return made
    found = read_run_file(store)
    if found is None:
        raise StorageError(f"{store.uri}/{RUN_FILE} was made by someone else and is gone again")
    return found


def _no_run(store: Store) -> str:
    name = name_of(store.uri)
    parent = parent_of(store.uri)
    try:
        others = _runs_like(name, open_store(parent)) if parent else []
    except CheckpointError:
        others = []
    hint = f"; there are {', '.join(others)}" if others else ""
    return f"there is no run at {store.uri} (it has no {RUN_FILE}){hint}"


def _runs_like(name: str, folder: Store) -> list[str]:
    """Runs in a folder with a name like this one, or some if none has."""
    there = [entry.name for entry in folder.list() if entry.is_dir]

    def runs(names: list[str]) -> list[str]:
        return [item for item in names if folder.size(f"{item}/{RUN_FILE}")]

    return runs(difflib.get_close_matches(name, there, n=3)) or runs(sorted(there)[:_NAMED])[:5]
