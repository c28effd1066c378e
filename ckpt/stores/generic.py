"""A run in any other storage that fsspec knows, such as gs://, abfs:// or memory://.

Each fsspec library has its own options, keys and retries, and reads them from its own environment. Objects
are taken to appear whole or not at all, as they do in object stores.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from ckpt.errors import CheckpointError, Corrupt, StorageError
from ckpt.exclusive import TEMPORARY
from ckpt.faults import point
from ckpt.store import Entry, Sink, Source
from ckpt.stores.addresses import Remote

_SETTLE_S = 0.3
_PARALLEL = 8

_exclusive: dict[str, bool] = {}
_exclusive_lock = threading.Lock()


class FsspecStore:
    """A place that fsspec reaches."""

    def __init__(self, address: Remote) -> None:
        self._address = address
        try:
            found = fsspec.url_to_fs(address.uri, use_listings_cache=False)
        except ImportError as error:
            raise StorageError(f"{address.uri} needs a package that is not installed: {error}") from error
        except Exception as error:
            raise StorageError(f"{address.uri} can't be opened: {error}") from error
        self._fs: Any = found[0]
        self._root = str(found[1]).rstrip("/")

    def __repr__(self) -> str:
        return f"FsspecStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return self._address.uri

    def path(self, key: str) -> Path:
        raise StorageError(f"{self.uri}/{key} is in an object store and has no path in the file system")

    def read(self, key: str, limit: int | None = None) -> bytes:
        with self._reporting("read", key):
            if limit is not None and (size := self._fs.info(self._key(key))["size"]) > limit:
                raise Corrupt(f"{self.uri}/{key} has {size} bytes, where at most {limit} make sense")
            return bytes(self._fs.cat_file(self._key(key)))

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        with self._reporting("read", key):
            fill(self._fs, self._key(key), f"{self.uri}/{key}", start, into)

    def size(self, key: str) -> int | None:
        with self._reporting("look at", key, "size"):
            try:
                found = self._fs.info(self._key(key))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def list(self, prefix: str = "") -> list[Entry]:
        place = self._key(prefix)
        with self._reporting("list", prefix):
            # Some libraries keep what they have listed, whatever they are told.
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(place, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            entries = [_entry(item) for item in found if item["name"].strip("/") != place.strip("/")]
        return [entry for entry in entries if entry.name and not entry.name.startswith(TEMPORARY)]

    def create(self, key: str, data: bytes) -> bool:
        with self._reporting("create", key):
            if self._creates_exclusively(self._key(key)):
                return _create(self._fs, self._key(key), data)
            if self._fs.exists(self._key(key)):
                return False
            self._fs.pipe_file(self._key(key), data)
            # Another creator may have put its own between the look and the write; see `ObjectStore.create`.
            time.sleep(_SETTLE_S)
            return bytes(self._fs.cat_file(self._key(key))) == data

    def put(self, key: str, data: bytes, durable: bool = True) -> None:  # noqa: ARG002
        with self._reporting("write", key, "put"):
            self._fs.pipe_file(self._key(key), data)

    def delete(self, key: str) -> None:
        with self._reporting("delete", key), suppress(FileNotFoundError):
            self._fs.rm_file(self._key(key))

    def delete_tree(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"refusing to delete all of {self.uri}")
        with self._reporting("delete", prefix), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._key(prefix), recursive=True)

    def make_dir(self, key: str) -> None:
        with self._reporting("make the folder", key, "mkdir"):
            # A library may make a bucket that is asked for as a folder.
            if "/" in self._key(key).strip("/"):
                self._fs.makedirs(self._key(key), exist_ok=True)

    def remove_if_empty(self, key: str) -> None:
        with suppress(Exception):
            self._fs.rmdir(self._key(key))

    def free(self) -> int | None:
        return None

    def abort_uploads(self, wanted: Callable[[str], bool]) -> int:  # noqa: ARG002
        return 0

    def open_sink(self, key: str, size: int, *, direct: bool, say: Callable[[str], None]) -> Sink:  # noqa: ARG002
        with self._reporting("write", key, "open"):
            return _FsspecSink(self, key, size, self._fs.open(self._key(key), "wb"))

    def open_source(self, key: str, *, direct: bool) -> Source:  # noqa: ARG002
        with self._reporting("read", key):
            return _FsspecSource(self, key, int(self._fs.info(self._key(key))["size"]))

    def _key(self, key: str) -> str:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise StorageError(f"{key!r} is not a name inside {self.uri}")
        return "/".join([self._root, *parts])

    def _creates_exclusively(self, key: str) -> bool:
        kind = self._address.protocol
        with _exclusive_lock:
            if kind not in _exclusive:
                probe = f"{key.rpartition('/')[0]}/{TEMPORARY}probe-{os.urandom(8).hex()}"
                try:
                    _create(self._fs, probe, b"probe")
                    _exclusive[kind] = not _create(self._fs, probe, b"probe")
                except NotImplementedError:
                    _exclusive[kind] = False
                finally:
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(probe)
            return _exclusive[kind]

    @contextmanager
    def _reporting(self, verb: str, key: str, operation: str | None = None) -> Iterator[None]:
        name = f"{self.uri}/{key}".rstrip("/")
        self._key(key)
        try:
            point(operation or verb, name)
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            if verb == "read":
                raise
            raise StorageError(f"can't {verb} {name}: its bucket or folder is gone") from error
        except OSError as error:
            raise StorageError(f"can't {verb} {name}: {error.strerror or error}") from error
        except Exception as error:
            # Each library raises errors of its own; what they have in common is their text.
            raise StorageError(f"can't {verb} {name}: {type(error).__name__}: {error}") from OSError(
                errno.EIO, str(error)
            )


class _FsspecSink:
    """A new object, written by one thread after the other in the order of its bytes."""

    direct = False
    reread = True

    def __init__(self, store: FsspecStore, key: str, size: int, file: Any) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._file = file
        self._next = 0
        self._over = False
        self._changed = threading.Condition()

    def write(self, block: memoryview, offset: int) -> None:
        block = block[: self._size - offset]
        with self._changed:
            while offset != self._next and not self._over:
                self._changed.wait()
            try:
                if self._over:
                    raise StorageError(f"{self._store.uri}/{self._key} is no longer written")
                with self._store._reporting("write", self._key, "pwrite"):
                    self._file.write(block)
                self._next += len(block)
            except BaseException:
                self._over = True
                raise
            finally:
                self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def finish(self) -> None:
        with self._store._reporting("write", self._key, "finish"):
            self._over = True
            self._file.close()
        found = self._store.size(self._key)
        if found != self._size or self._next != self._size:
            text = f"it has {found} bytes, {self._size} were to be written"
            raise StorageError(f"can't write {self._store.uri}/{self._key}: {text}") from OSError(
                errno.EIO, text
            )

    def close(self) -> None:
        with self._changed:
            unfinished, self._over = not self._over or self._next != self._size, True
            self._changed.notify_all()
        if unfinished:
            with suppress(Exception):
                self._file.discard()
            with suppress(Exception):
                self._file.close()
            with suppress(StorageError):
                self._store.delete(self._key)


class _FsspecSource:
    """One object, read by ranges."""

    direct = False
    parallel = _PARALLEL

    def __init__(self, store: FsspecStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self.size = size

    def read_into(self, start: int, into: memoryview) -> None:
        try:
            self._store.read_into(self._key, start, into)
        except FileNotFoundError as error:
            raise StorageError(f"{self._store.uri}/{self._key} is gone") from error

    def close(self) -> None:
        return


def fill(fs: Any, path: str, name: str, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of an object from `start` on. Raises Corrupt if there are fewer."""
    if not into:
        return
    end = start + len(into)
    size = fs.info(path)["size"]
    if size < end:
        raise Corrupt(f"{name} ends at byte {size}, before {end}")
    got = fs.cat_file(path, start=start, end=end)
    if len(got) != len(into):
        raise OSError(errno.EIO, f"{len(into)} bytes were asked for, {len(got)} came")
    into[:] = got


def _create(fs: Any, path: str, data: bytes) -> bool:
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    return True


def _entry(item: dict[str, Any]) -> Entry:
    is_dir = item["type"] == "directory"
    return Entry(item["name"].rstrip("/").rpartition("/")[2], is_dir, 0 if is_dir else int(item["size"] or 0))
