"""Committing an attempt: from the parts of all ranks to the manifest that makes it a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.errors import Corrupt, NotCommitted, StorageError
from ckpt.fence import assert_not_fenced
from ckpt.manifest import MAX_MANIFEST, MAX_PART, merge_parts, parse_part
from ckpt.names import DOOMED, MANIFEST, parse_attempt, part_name, part_rank
from ckpt.run import Run
from ckpt.store import Store

_THREADS = 16
_END = b"}}"


def commit(
    store: Store,
    attempt: str,
    world_size: int,
    launch: int,
    run_id: str,
    signing_key: bytes | None = None,
) -> Checkpoint:
    """Commit an attempt whose shards and parts are all durable; to do so again is no error.

    `launch` is the committing one: the attempt's own, or a later one that clears up. Raises NotCommitted if a
    part or a shard is not there, Corrupt if they don't make up a checkpoint, Fenced if a launch higher than
    `launch` exists, StorageError if the storage fails.
    """
    named = parse_attempt(attempt)
    if named is None:
        raise NotCommitted(f"{attempt!r} is not the name of an attempt at a checkpoint")
    raw = _read_parts(store, attempt, world_size)
    parts = [parse_part(data, signing_key, f"{attempt}/{part_name(rank)}") for rank, data in enumerate(raw)]
    _check_shards(store, attempt, parts, world_size, run_id)
    data = merge_parts(parts, signing_key)
    assert_not_fenced(store, launch)
    _publish(store, f"{attempt}/{MANIFEST}", data)
    step, made_by = named
    return Checkpoint(store.uri, attempt, step, made_by, run_id=run_id)


def _read_parts(store: Store, attempt: str, world_size: int) -> list[bytes]:
    def read(rank: int) -> bytes | None:
        try:
            return store.read(f"{attempt}/{part_name(rank)}", MAX_PART)
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(min(_THREADS, world_size)) as pool:
        parts = list(pool.map(read, range(world_size)))
    missing = [rank for rank, part in enumerate(parts) if part is None]
    if missing:
        ranks = f"{missing[:10]}{' and more' if len(missing) > 10 else ''}"
        raise NotCommitted(f"{attempt} can't be committed: of {world_size} ranks, {ranks} are not durable")
    return [part for part in parts if part is not None]


def _check_shards(
    store: Store, attempt: str, parts: list[dict[str, Any]], world_size: int, run_id: str
) -> None:
    for rank, part in enumerate(parts):
        what = f"{attempt}/{part_name(rank)}"
        said = {"rank": rank, "attempt": attempt, "world_size": world_size, "run_id": run_id}
        for field, expected in said.items():
            if part[field] != expected:
                raise Corrupt(f"{what} says {field} {part[field]!r}, where it has to be {expected!r}")
        entry = part["file"]
        if entry is None:
            continue
        size = store.size(f"{attempt}/{entry['name']}")
        if size is None:
            raise NotCommitted(f"{attempt} can't be committed: {entry['name']} is not there")
        if size != entry["size"]:
            raise Corrupt(f"{attempt}/{entry['name']} has {size} bytes, where its rank wrote {entry['size']}")


def _publish(store: Store, key: str, data: bytes) -> None:
    if store.create(key, data):
        return
    try:
        there = store.read(key, MAX_MANIFEST)
    except FileNotFoundError as error:
        raise StorageError(f"{store.uri}/{key} was there and is gone: somebody deletes in the run") from error
    if there == data:
        return
    # Where files can be created exclusively but not whole, a committer that died leaves the beginning of the
    # very bytes that every committer writes.
    if data.startswith(there):
        store.put(key, data)
        return
    raise Corrupt(f"{store.uri}/{key} exists and is not the manifest of what lies beside it")


def uncommitted(store: Store, below_launch: int) -> list[str]:
    """Attempts of launches older than `below_launch` with no manifest, or only the beginning of one."""
    named = ((entry.name, parse_attempt(entry.name)) for entry in store.list() if entry.is_dir)
    older = [name for name, parsed in named if parsed is not None and parsed[1] < below_launch]
    if not older:
        return []
    with ThreadPoolExecutor(_THREADS) as pool:
        committed = list(pool.map(lambda name: _is_whole(store, f"{name}/{MANIFEST}"), older))
    return sorted(name for name, whole in zip(older, committed, strict=True) if not whole)


def _is_whole(store: Store, key: str) -> bool:
    """Whether a manifest is there to its end; what else is wrong with it is not for committers to judge."""
    size = store.size(key)
    if size is None or size < len(_END):
        return False
    end = bytearray(len(_END))
    try:
        store.read_into(key, size - len(_END), memoryview(end))
    except FileNotFoundError:
        return False
    return end == _END


def posthumous(run: Run, launch: int, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """Commit what launches older than `launch` left complete but for the manifest; the attempts so committed.

    What is incomplete is left alone; what is complete but wrong is named to `say`. Raises Fenced,
    StorageError.
    """
    done = []
    for attempt in uncommitted(run.store, launch):
        world_size = _world_size(run, attempt)
        # An attempt marked as doomed was committed once and is being deleted.
        if world_size is None or run.store.size(f"{attempt}/{DOOMED}") is not None:
            continue
        try:
            commit(run.store, attempt, world_size, launch, run.id, run.signing_key)
        except NotCommitted:
            continue
        except Corrupt as error:
            say(f"{attempt} is not committed: {error}")
            continue
        done.append(attempt)
    return done


def _world_size(run: Run, attempt: str) -> int | None:
    """How many ranks an attempt has, if as many parts are there."""
    names = [entry.name for entry in run.store.list(attempt) if part_rank(entry.name) is not None]
    if part_name(0) not in names:
        return None
    try:
        lead = parse_part(run.store.read(f"{attempt}/{part_name(0)}", MAX_PART), run.signing_key)
    except (FileNotFoundError, Corrupt):
        return None
    world_size = int(lead["world_size"])
    return world_size if len(names) >= world_size else None
