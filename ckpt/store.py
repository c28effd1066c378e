"""The storage of a run, behind an interface small enough for folders and object stores alike.

Keys are relative paths with `/` between their parts. Errors of the operating system become StorageError, with
the `OSError` as `__cause__`; only a key that isn't there, when read, is a FileNotFoundError.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ckpt import exclusive
from ckpt.errors import Corrupt, StorageError
from ckpt.faults import point
from ckpt.names import folder_of

_STALE_RETRIES = 3
_T = TypeVar("_T")


class Entry(NamedTuple):
    """One name in a listing; `size` is in bytes, 0 for folders."""

    name: str
    is_dir: bool
    size: int


class Store(Protocol):
    """Where one run lives. All methods raise StorageError when the storage fails."""

    @property
    def uri(self) -> str:
        """The canonical address, which `open_store` takes back."""

    def read(self, key: str, limit: int | None = None) -> bytes:
        """The whole content. FileNotFoundError if absent, Corrupt if longer than `limit` bytes."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        FileNotFoundError if absent, Corrupt if there are fewer.
        """

    def size(self, key: str) -> int | None:
        """Bytes in a file, or None if there is no such file."""

    def list(self, prefix: str = "") -> list[Entry]:
        """The names directly below `prefix`, in no particular order; none if there is no such folder."""

    def create(self, key: str, data: bytes) -> bool:
        """Create durably and exclusively; False if the key exists already."""

    def put(self, key: str, data: bytes, durable: bool = True) -> None:
        """Create or replace, atomically."""

    def delete(self, key: str) -> None:
        """Remove one file; one that isn't there is no error."""

    def delete_tree(self, prefix: str) -> None:
        """Remove a folder and all in it; one that isn't there is no error. Goes on past what can't be
        removed.
        """

    def make_dir(self, key: str) -> None:
        """Make a folder and its parents, durably; one that exists is no error."""

    def path(self, key: str) -> Path:
        """Where the key lies in the file system. Only folders have one."""


def open_store(uri: str | Path) -> Store:
    """The storage at an address: `/p`, `p`, `~/p` or `file:///p`. Raises StorageError for any other kind.

    A folder's canonical address is its absolute path, so it may hold any character that a path may. Nothing
    is made or looked at yet.
    """
    return _FolderStore(folder_of(uri))


class _FolderStore:
    """A folder: local, or on a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return str(self._root)

    def path(self, key: str) -> Path:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise StorageError(f"{key!r} is not a name inside {self.uri}")
        return self._root.joinpath(*parts)

    def read(self, key: str, limit: int | None = None) -> bytes:
        with self._reporting("read", key), self._open(key) as fd:
            size = os.fstat(fd).st_size
            if limit is not None and size > limit:
                raise Corrupt(f"{self.path(key)} has {size} bytes, where at most {limit} make sense")
            chunks: list[bytes] = []
            left = size + 1 if limit is None else limit + 1
            while left > 0 and (chunk := os.read(fd, min(left, 1 << 24))):
                chunks.append(chunk)
                left -= len(chunk)
            if limit is not None and left <= 0:
                raise Corrupt(f"{self.path(key)} has more than {limit} bytes, which makes no sense")
            return b"".join(chunks)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        with self._reporting("read", key), self._open(key) as fd:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], start + done)
                if count == 0:
                    raise Corrupt(f"{self.path(key)} ends at byte {start + done}, before {start + len(into)}")
                done += count

    def size(self, key: str) -> int | None:
        with self._reporting("look at", key):
            point("size", self.path(key))
            try:
                found = _again_if_stale(lambda: self.path(key).stat())
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> list[Entry]:
        with self._reporting("list", prefix):
            point("list", self.path(prefix))
            try:
                return _again_if_stale(lambda: list(_entries(self.path(prefix))))
            except FileNotFoundError:
                return []

    def create(self, key: str, data: bytes) -> bool:
        with self._reporting("create", key):
            point("create", self.path(key))
            return exclusive.create(self.path(key), data)

    def put(self, key: str, data: bytes, durable: bool = True) -> None:
        path = self.path(key)
        with self._reporting("write", key):
            point("put", path)
            temporary = exclusive.write_temporary(path, data, durable)
            try:
                point("rename", path)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            if durable:
                exclusive.sync_folder(path.parent)

    def delete(self, key: str) -> None:
        with self._reporting("delete", key):
            point("delete", self.path(key))
            self.path(key).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"refusing to delete all of {self.uri}")
        failed: list[OSError] = []

        def note(_: Callable[..., object], __: str, info: tuple[type, BaseException, object]) -> None:
            error = info[1]
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                failed.append(error)

        with self._reporting("delete", prefix):
            point("delete", self.path(prefix))
            path = self.path(prefix)
            if path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, onerror=note)
            if failed:
                raise failed[0]

    def make_dir(self, key: str) -> None:
        with self._reporting("make the folder", key):
            point("mkdir", self.path(key))
            missing: list[Path] = []
            path = self.path(key)
            while not path.is_dir():
                missing.append(path)
                path = path.parent
                if path == path.parent:
                    break
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                exclusive.sync_folder(folder.parent)

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        # O_NONBLOCK: a pipe put in a file's place by mistake or malice must not hang the reader.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        point("read", self.path(key))
        try:
            fd = _again_if_stale(lambda: os.open(self.path(key), flags))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise Corrupt(f"{self.path(key)} is a link that leads nowhere") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Corrupt(f"{self.path(key)} is not a plain file")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _reporting(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if verb == "read":
                raise
            raise StorageError(
                f"can't {verb} {self.path(key)}: its folder is gone ({error.strerror})"
            ) from error
        except OSError as error:
            raise StorageError(f"can't {verb} {self.path(key)}: {_reason(error)}") from error


def _entries(folder: Path) -> Iterator[Entry]:
    with os.scandir(folder) as found:
        for item in found:
            if item.name.startswith(exclusive.TEMPORARY):
                continue
            # A link to a folder counts as no folder: nothing outside a run is ever taken for a part of it.
            is_dir = item.is_dir(follow_symlinks=False)
            try:
                size = 0 if is_dir else item.stat().st_size
            except OSError as error:
                leads_nowhere = item.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP)
                if not leads_nowhere and error.errno != errno.ENOENT:
                    raise
                if not leads_nowhere:
                    continue
                size = 0  # a link that leads nowhere: its name is taken all the same
            yield Entry(item.name, is_dir, size)


def _again_if_stale(operation: Callable[[], _T]) -> _T:
    # NFS answers ESTALE for a file replaced by another client between look-up and use; a second look-up finds
    # it.
    for left in range(_STALE_RETRIES, -1, -1):
        try:
            return operation()
        except OSError as error:
            if error.errno != errno.ESTALE or left == 0:
                raise
    raise AssertionError("unreachable")


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    advice = {
        errno.ENOSPC: "free space there, or keep fewer checkpoints",
        errno.EDQUOT: "the quota is used up: free space there, or have it raised",
        errno.EACCES: "check the owner and permissions of the folder",
        errno.EPERM: "check the owner and permissions of the folder",
        errno.EROFS: "it is mounted read-only",
        errno.ENOTDIR: "a part of this path is a file where a folder is needed",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ESTALE: "the NFS server no longer knows the folder: mount it again",
        errno.EIO: "the storage reports a fault: look at its log and at dmesg",
    }.get(error.errno or 0)
    return f"{text} ({advice})" if advice else text
