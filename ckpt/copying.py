"""Copying checkpoints between any two storages: every byte is checked on its way, the manifest comes last.

What is there already is compared, never overwritten by something else; what is there and verifies is not
copied again, so that a copy that was interrupted is gone on with by asking for it once more.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.discover import committed
from ckpt.errors import Corrupt, NotCommitted, StateError, StorageError
from ckpt.manifest import MAX_PART, FileEntry
from ckpt.names import LOGS, MANIFEST, PINS, RUN_FILE, parse_attempt, part_rank, split_checkpoint
from ckpt.reader import read_chunks
from ckpt.run import MAX_RUN_FILE, open_run
from ckpt.store import Store, open_store
from ckpt.verification import as_checkpoint
from ckpt.writer.retry import retrying

__all__ = ["Copied", "copy"]

_RETRY_S = 60.0
_BEAT = ".beat"
# What may have grown or moved since the last copy; all else is written once.
_MOVING = (f"{LOGS}/", f"{PINS}/")

Say = Callable[[str], None]


@dataclass
class Copied:
    """What a copy did: `copied` and `present` name checkpoints, `problems` says which are not in the copy and
    why. `nbytes` of shards were copied in `seconds`; `skipped` shards were there and verified.
    """

    source: str
    dest: str
    copied: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    nbytes: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything that was asked for is in the copy now."""
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {"ok": self.ok, **asdict(self)}


def copy(source: str, dest: str, say: Say = lambda _: None) -> Copied:
    """Copy a run to `dest`, or one checkpoint into the run at `dest`, which is made if it isn't there.

    Of a run its committed checkpoints are copied, newest first, and all that lies beside them, but for the
    heartbeats. `say` gets a line per checkpoint. A damaged checkpoint, or one whose copy fails, is named
    among the problems, has no manifest in the copy, and keeps no other from being copied. One that is pruned
    meanwhile is left out.

    Raises NotCommitted if there is nothing to copy, StateError if `dest` holds something else or lies inside
    the source, Corrupt, StorageError.
    """
    begun = time.monotonic()
    checkpoint = None if split_checkpoint(open_store(source).uri) is None else as_checkpoint(source)
    if checkpoint is None:
        run = open_run(source, create=False)
        work = _Copy(run.store, _target(run.store, dest, None))
        chosen = committed(run)
    else:
        work = _Copy(checkpoint.store, _target(checkpoint.store, dest, checkpoint.attempt))
        chosen = [checkpoint]
        checkpoint.manifest  # noqa: B018 - raises what is wrong with it
    work.claim()
    if checkpoint is None:
        work.rest()
    for item in chosen:
        work.checkpoint(item, say)
    work.done.seconds = time.monotonic() - begun
    return work.done


def _target(source: Store, dest: str, attempt: str | None) -> Store:
    """The run to copy into. StateError for an address that can't be meant."""
    target = open_store(dest)
    inside = split_checkpoint(target.uri)
    if inside is not None:
        if inside[1] != attempt:
            meant = f"a checkpoint keeps its name, {attempt}" if attempt else "a run is no checkpoint"
            raise StateError(f"{target.uri} is the folder of a checkpoint, and {meant}: give {inside[0]}")
        target = open_store(inside[0])
    ours, theirs = f"{source.uri.rstrip('/')}/", f"{target.uri.rstrip('/')}/"
    if theirs.startswith(ours) or ours.startswith(theirs):
        raise StateError(f"{source.uri} and its copy, {target.uri}, have to lie apart")
    return target


class _Copy:
    """One copy under way."""

    def __init__(self, source: Store, dest: Store) -> None:
        self._source = source
        self._dest = dest
        self.done = Copied(source.uri, dest.uri)

    def claim(self) -> None:
        """Make `dest` this run's, or see that it is. Raises StateError if it is anything else."""
        theirs = _read(self._dest, RUN_FILE, MAX_RUN_FILE)
        ours = _read(self._source, RUN_FILE, MAX_RUN_FILE)
        if theirs is None:
            there = [entry.name for entry in self._dest.list()]
            strange = [name for name in there if ours is not None or parse_attempt(name) is None]
            if strange:
                raise StateError(
                    f"{self._dest.uri} holds {strange[0]} but is no run: choose another place for the copy"
                )
        if ours is None:
            if theirs is not None:
                raise StateError(f"{self._dest.uri} is a run, and {self._source.uri} has no {RUN_FILE}")
            self._dest.make_dir("")
        elif theirs is None:
            self._dest.make_dir("")
            self._dest.create(RUN_FILE, ours)
            theirs = _read(self._dest, RUN_FILE, MAX_RUN_FILE)
        if theirs != ours:
            raise StateError(
                f"{self._dest.uri} is another run than {self._source.uri}: choose another place for the copy"
            )

    def rest(self) -> None:
        """Copy what is no checkpoint: launches, pins, logs, and what others keep in the run."""
        for key in _files(self._source, ""):
            if key == RUN_FILE or key.endswith(_BEAT):
                continue
            data = _read(self._source, key)
            if data is not None:  # else gone since it was listed
                self._small(key, data, moving=key.startswith(_MOVING))

    def checkpoint(self, item: Checkpoint, say: Say) -> None:
        """Copy one checkpoint, unless it is there; what goes wrong with it becomes a problem."""
        before = self.done.nbytes
        try:
            raw = item.manifest.raw
            there = _read(self._dest, f"{item.attempt}/{MANIFEST}")
            if there is not None and not raw.startswith(there):
                raise StateError("the copy holds another manifest under this name")
            for entry in item.manifest.files:
                self._shard(item.attempt, entry)
            for found in self._source.list(item.attempt):
                if part_rank(found.name) is not None:
                    self._part(f"{item.attempt}/{found.name}")
            self._small(f"{item.attempt}/{MANIFEST}", raw)
        except (Corrupt, NotCommitted, StateError, StorageError) as error:
            if self._source.size(f"{item.attempt}/{MANIFEST}") is None:
                say(f"pruned   {item.attempt}")
                return
            self.done.problems.append(f"{item.attempt}: {error}")
            say(f"NOT copied {item.attempt}: {error}")
            return
        if there is not None and self.done.nbytes == before:
            self.done.present.append(item.attempt)
            say(f"there    {item.attempt}")
        else:
            self.done.copied.append(item.attempt)
            say(f"copied   {item.attempt}")

    def _shard(self, attempt: str, entry: FileEntry) -> None:
        key = f"{attempt}/{entry.name}"
        if self._dest.size(key) == entry.size and self._verifies(attempt, entry):
            self.done.skipped += 1
            return
        self._dest.make_dir(attempt)
        retrying(lambda: self._shard_once(attempt, entry), _RETRY_S, time.sleep)
        self.done.nbytes += entry.size

    def _shard_once(self, attempt: str, entry: FileEntry) -> None:
        key = f"{attempt}/{entry.name}"
        self._dest.delete(key)
        sink = self._dest.open_sink(key, entry.size, direct=True, say=lambda _: None)
        try:
            read_chunks(
                self._source,
                attempt,
                entry.name,
                entry,
                sink.write,
                fresh=not sink.direct,
                failed=sink.abandon,
            )
            sink.finish()
        finally:
            sink.close()
        if sink.reread and not self._verifies(attempt, entry):
            reason = f"{self._dest.uri}/{key} is not what was written"
            raise StorageError(reason) from OSError(errno.EAGAIN, reason)

    def _verifies(self, attempt: str, entry: FileEntry) -> bool:
        try:
            read_chunks(self._dest, attempt, entry.name, entry, lambda *_: None)
        except Corrupt:
            return False
        return True

    def _part(self, key: str) -> None:
        data = _read(self._source, key, MAX_PART)
        if data is not None:
            self._small(key, data)

    def _small(self, key: str, data: bytes, moving: bool = False) -> None:
        if "/" in key:
            self._dest.make_dir(key.rpartition("/")[0])
        if retrying(lambda: self._dest.create(key, data), _RETRY_S, time.sleep):
            return
        found = self._dest.read(key)
        if found == data:
            return
        # The beginning of it is what a copy leaves that died where files can't be created whole.
        if not moving and not data.startswith(found):
            raise StateError(f"{self._dest.uri}/{key} is there and is not what {self._source.uri} holds")
        retrying(lambda: self._dest.put(key, data), _RETRY_S, time.sleep)


def _read(store: Store, key: str, limit: int | None = None) -> bytes | None:
    try:
        return store.read(key, limit)
    except FileNotFoundError:
        return None


def _files(store: Store, prefix: str) -> Iterator[str]:
    """The keys of all files of a run that are in no attempt's folder."""
    for entry in store.list(prefix):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if not entry.is_dir:
            yield key
        elif prefix or parse_attempt(entry.name) is None:
            yield from _files(store, key)
