"""A run in a folder: local, or on a network file system."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ckpt import exclusive
from ckpt.direct_io import free_bytes
from ckpt.errors import Corrupt, StorageError
from ckpt.faults import point
from ckpt.store import Entry, Sink, Source
from ckpt.stores.files import FileSink, FileSource
from ckpt.stores.system_errors import reporting

_STALE_RETRIES = 3
_T = TypeVar("_T")


class FolderStore:
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
        with reporting("read", self.path(key)), self._open(key) as fd:
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
        with reporting("read", self.path(key)), self._open(key) as fd:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], start + done)
                if count == 0:
                    raise Corrupt(f"{self.path(key)} ends at byte {start + done}, before {start + len(into)}")
                done += count

    def size(self, key: str) -> int | None:
        with reporting("look at", self.path(key)):
            point("size", self.path(key))
            try:
                found = _again_if_stale(lambda: self.path(key).stat())
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> list[Entry]:
        with reporting("list", self.path(prefix)):
            point("list", self.path(prefix))
            try:
                return _again_if_stale(lambda: list(_entries(self.path(prefix))))
            except FileNotFoundError:
                return []

    def create(self, key: str, data: bytes) -> bool:
        with reporting("create", self.path(key)):
            point("create", self.path(key))
            return exclusive.create(self.path(key), data)

    def put(self, key: str, data: bytes, durable: bool = True) -> None:
        path = self.path(key)
        with reporting("write", self.path(key)):
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
        with reporting("delete", self.path(key)):
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

        with reporting("delete", self.path(prefix)):
            point("delete", self.path(prefix))
            path = self.path(prefix)
            if path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, onerror=note)
            if failed:
                raise failed[0]

    def make_dir(self, key: str) -> None:
        with reporting("make the folder", self.path(key)):
            point("mkdir", self.path(key))
            if key and not self._root.is_dir():
                # Removed or renamed under its users: what they would write into a new one would be lost.
                raise StorageError(f"the folder {self.uri} is gone")
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

    def remove_if_empty(self, key: str) -> None:
        with suppress(OSError):
            self.path(key).rmdir()

    def free(self) -> int | None:
        path = self._root
        try:
            while not path.exists() and path != path.parent:
                path = path.parent
            return free_bytes(path)
        except OSError:
            return None

    def abort_uploads(self, wanted: Callable[[str], bool]) -> int:  # noqa: ARG002
        return 0

    def open_sink(self, key: str, size: int, *, direct: bool, say: Callable[[str], None]) -> Sink:
        return FileSink(self.path(key), size, direct, say)

    def open_source(self, key: str, *, direct: bool) -> Source:
        return FileSource(self.path(key), direct)

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
