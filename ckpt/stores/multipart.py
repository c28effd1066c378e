"""Uploading one large object while it grows: its parts go out straight from the caller's memory.

obstore's `put` pulls blocks from an iterator, cuts them into parts without copying, keeps several parts in
flight, sends a part again that fails for a passing reason, and aborts the upload on any other error. So all
that is left to do here is to hand it the blocks in order, and no more of them than may be in flight.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpt.errors import StorageError
from ckpt.faults import point

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Call", "MultipartSink", "part_size"]

MAX_PARTS = 10_000
_MIB = 1 << 20
_T = TypeVar("_T")


class Call(Protocol):
    """Does requests about one object: again while that makes sense, and with the errors of `ckpt.store`."""

    def __call__(self, verb: str, work: Callable[[], _T], /) -> _T:
        """Do `work`, maybe more than once; "can't VERB this object" is what messages begin with."""


def part_size(size: int, wanted: int) -> int:
    """Bytes per part of an object of `size` bytes: `wanted`, or as many whole MiB as 10,000 parts need."""
    return max(wanted, -(-size // (MAX_PARTS * _MIB)) * _MIB)


class MultipartSink:
    """A new object of `size` bytes at `path` of an obstore store. See `ckpt.store.Sink`.

    Blocks may be written in any order by several threads, but the upload goes on with the first that is
    missing. A block's memory is read until its part is there: it must stay as it is until `finish` or
    `close`. `write` waits while more bytes are on their way than `in_flight` parts of `part` bytes and two
    more. An object of one part at most is put in one piece, when it is finished.
    """

    direct = False
    reread = True

    def __init__(
        self, store: ObjectStore, path: str, size: int, call: Call, *, part: int, in_flight: int
    ) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._call = call
        self._part = part_size(size, part)
        self._in_flight = in_flight
        # Two more than are in flight: obstore holds a part that is not full yet, and a block that waits.
        self._limit = (in_flight + 2) * self._part
        self._changed = threading.Condition()
        self._blocks: dict[int, memoryview] = {}
        self._next = 0
        self._held = 0
        self._begun = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._upload: threading.Thread | None = None
        if size > self._part:
            self._upload = threading.Thread(target=self._run, name="upload", daemon=True)
            self._upload.start()

    def write(self, block: memoryview, offset: int) -> None:
        """Hand over the bytes from `offset` on; what pads the last block is left out.

        Raises StorageError if the upload has failed or was given up.
        """
        block = block[: self._size - offset]
        with self._changed:
            while self._crowded(len(block), offset) and self._error is None and not self._abandoned:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._abandoned:
                raise StorageError(f"{self._path} is no longer written")
            self._blocks[offset] = block
            self._held += len(block)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Give the upload up, without waiting for the end of it."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Complete the upload, and look at the object's size. Raises StorageError."""
        if self._upload is not None:
            self._upload.join()
            if self._error is not None:
                raise self._error
        else:
            whole = list(self._in_order())
            self._call("write", lambda: self._put(iter(whole), multipart=False))
        found: int | None = None
        with suppress(FileNotFoundError):
            found = self._call("look at", self._head)["size"]
        if found != self._size:
            there = "is not there" if found is None else f"has {found} bytes"
            raise self._start_over(f"it {there} after its upload, {self._size} bytes were sent")
        self.close()

    def close(self) -> None:
        """Abort the upload unless it is finished, and wait for that; the store keeps no part of it."""
        self.abandon()
        if self._upload is not None:
            self._upload.join()
        self._blocks.clear()

    def _run(self) -> None:
        try:
            self._call("write", self._put_once)
        except _AbandonedError:
            return
        except FileNotFoundError:
            # The store doesn't know the upload: somebody removed it, or it was completed by a try whose
            # answer was lost. In that case, only, is the object there.
            if self._next < self._size:
                self._fail(self._start_over("its upload is gone"))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _put_once(self) -> None:
        if self._begun:
            # What has been sent can't be asked for again; its writer has all of it, and starts over.
            raise self._start_over("its upload broke off")
        self._begun = True
        self._put(self._in_order(), multipart=True)

    def _start_over(self, reason: str) -> StorageError:
        error = StorageError(f"can't write {self._path}: {reason}")
        error.__cause__ = OSError(errno.EAGAIN, reason)
        return error

    def _put(self, blocks: Iterator[memoryview], multipart: bool) -> None:
        import obstore

        point("upload", self._path)
        obstore.put(
            self._store,
            self._path,
            blocks,
            use_multipart=multipart,
            chunk_size=self._part,
            max_concurrency=self._in_flight,
        )
        point("uploaded", self._path)

    def _head(self) -> Any:
        import obstore

        return obstore.head(self._store, self._path)

    def _crowded(self, nbytes: int, offset: int) -> bool:
        # The block that the upload waits for is always let in: all others may be waiting for it.
        return offset > self._next and self._held + nbytes > self._limit

    def _in_order(self) -> Iterator[memoryview]:
        """The blocks from the first to the last, each when it is there; raises once the sink is closed."""
        while self._next < self._size:
            with self._changed:
                while self._next not in self._blocks and not self._abandoned:
                    self._changed.wait()
                if self._abandoned:
                    raise _AbandonedError
                block = self._blocks.pop(self._next)
                self._next += len(block)
                self._changed.notify_all()
            point("part", self._path)
            # Its memory is let go of when its part has been sent, or will not be.
            weakref.finalize(block, self._released, len(block)).atexit = False
            yield block
            del block

    def _released(self, nbytes: int) -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()


class _AbandonedError(Exception):
    """The sink was closed before its object was whole."""
