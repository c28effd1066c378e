"""The storage of a run, behind an interface small enough for folders and object stores alike.

Keys are relative paths with `/` between their parts. Errors of the operating system become StorageError, with
the `OSError` as `__cause__`; only a key that isn't there, when read, is a FileNotFoundError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ckpt.stores import addresses


class Entry(NamedTuple):
    """One name in a listing; `size` is in bytes, 0 for folders."""

    name: str
    is_dir: bool
    size: int


class Sink(Protocol):
    """One new large object, written by several threads in any order. Methods raise StorageError."""

    @property
    def direct(self) -> bool:
        """Whether blocks have to be whole pages in page-aligned memory, and go past the page cache."""

    @property
    def reread(self) -> bool:
        """Whether only reading it back tells what the storage has made of the bytes."""

    def write(self, block: memoryview, offset: int) -> None:
        """Write `block` at byte `offset`; it starts on a page, and only the last block may reach past the
        object's size, by what pads its page. Its memory may be used again at once if `direct`, else only
        after `finish` or `close`.
        """

    def abandon(self) -> None:
        """Nothing more will come: who waits in `write` for other blocks gets a StorageError. May be called
        while others write.
        """

    def finish(self) -> None:
        """Make the object whole, durable and visible, check its size, and close."""

    def close(self) -> None:
        """End without `finish`: nothing that could be taken for the object is left. After `finish`, nothing
        happens.
        """


class Source(Protocol):
    """One object, read by several threads at once."""

    size: int
    """Bytes."""

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache, as far as what they fill starts on a page in memory."""

    @property
    def parallel(self) -> int:
        """How many reads at once it takes to keep the storage busy; 1 where that is the reader's choice."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises StorageError, and Corrupt if there are fewer."""

    def close(self) -> None:
        """Let go of it; to do so twice is no error."""


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
        """Make a folder and its parents, durably; one that exists is no error.

        The store's own folder is made only when it is asked for by "". Raises StorageError if it is gone.
        """

    def remove_if_empty(self, key: str) -> None:
        """Remove a folder that nothing is in any more; one that is gone or in use stays. Raises nothing."""

    def free(self) -> int | None:
        """Bytes that can still be written, None where that can't be known."""

    def abort_uploads(self, wanted: Callable[[str], bool]) -> int:
        """End uploads that were begun and never finished, of keys that are `wanted`, and free what they hold;
        how many there were. Folders have none, and not every storage tells.
        """

    def open_sink(self, key: str, size: int, *, direct: bool, say: Callable[[str], None]) -> Sink:
        """Begin a new object of `size` bytes, past the page cache if `direct` and possible.

        `say` gets one line where that is not possible. The key must not be there.
        """

    def open_source(self, key: str, *, direct: bool) -> Source:
        """Open an object for reading. FileNotFoundError if absent, Corrupt if it is no plain file."""

    def path(self, key: str) -> Path:
        """Where the key lies in the file system. Only folders have one; others raise StorageError."""


def open_store(uri: str | Path) -> Store:
    """The storage at an address: a folder (`/p`, `p`, `~/p`, `file:///p`), `s3://bucket/prefix`, or what
    fsspec knows. Raises StorageError for any other.

    A folder's canonical address is its absolute path, so it may hold any character that a path may. Nothing
    is made or looked at yet.
    """
    place = addresses.parse(uri)
    # Imported when needed: the libraries behind object stores cost more than all the rest.
    if isinstance(place, addresses.Folder):
        from ckpt.stores.folder import FolderStore

        return FolderStore(place.path)
    if isinstance(place, addresses.Bucket):
        from ckpt.stores.objects import ObjectStore

        return ObjectStore(place)
    from ckpt.stores.generic import FsspecStore

    return FsspecStore(place)
