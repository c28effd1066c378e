"""Parallel reads of shard bytes in which nothing is handed out before its digest has been checked."""

from __future__ import annotations

import errno
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ckpt import faults
from ckpt.digest import CHUNK, chunk_digest
from ckpt.errors import Corrupt, StorageError
from ckpt.huge_pages import private_memory
from ckpt.store import Store
from ckpt.writer.retry import errno_of

__all__ = ["FileFacts", "Want", "read_chunks", "read_verified"]

_T = TypeVar("_T")
_PAGE = mmap.PAGESIZE
_THREADS = 4
_RETRIES = 3
_PATIENCE_S = 5.0
_TRANSIENT = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EREMOTEIO}
)


class FileFacts(Protocol):
    """What the manifest says of one file."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def digest_kind(self) -> str:
        """Which hash the chunk digests are made with."""

    @property
    def chunks(self) -> Sequence[str]:
        """Hex digest of every 16 MiB chunk, in order."""


@dataclass(frozen=True)
class Want:
    """The bytes `[start, end)` of `file`, to be written to `into` (writable, exactly that long).

    With a `pitch`, only the first `run` bytes of every `pitch` bytes from `start` on are wanted, one run
    after the other in `into`: the columns of a row-major matrix.
    """

    file: str
    start: int
    end: int
    into: memoryview
    run: int = 0
    pitch: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are written to `into`."""
        return self.rows * self.run if self.pitch else self.end - self.start

    @property
    def rows(self) -> int:
        """How many runs there are."""
        return (self.end - self.start - self.run) // self.pitch + 1 if self.pitch else 1


@dataclass(frozen=True)
class _Job:
    """One chunk of one file and the wants that touch it."""

    source: _Source
    index: int
    wants: tuple[Want, ...]


def read_verified(
    store: Store,
    attempt: str,
    files: Mapping[str, FileFacts],
    wants: Sequence[Want],
    *,
    threads: int = 4,
    direct: bool = True,
) -> int:
    """Fill every want with checked bytes; returns how many bytes were read from storage.

    Each chunk (16 MiB) that a want touches is read whole, and its digest is compared with the manifest's
    before a byte of it is copied out; one with another digest is read once more, as it may only have been
    damaged on its way. A want that covers a whole chunk gets it read straight
    into its own memory: targets are therefore landing memory, and hold rubbish after an error. Memory
    beyond the targets: one chunk per thread, for object stores up to two; these get more than `threads`
    where that keeps them busy. With `direct` the page cache is passed by where the storage
    allows it, and what had to be read through it is dropped from it again.

    Raises Corrupt (a file is missing, has another size, or a chunk has another digest: named with file,
    chunk and byte range) or StorageError (the storage failed, after retries).
    """
    by_file: dict[str, list[Want]] = {}
    for want in wants:
        _check_want(want, files, attempt)
        if want.end > want.start:
            by_file.setdefault(want.file, []).append(want)
    with ExitStack() as stack:
        jobs: list[_Job] = []
        for name, its_wants in by_file.items():
            source = _Source(store, attempt, name, files[name], direct)
            stack.callback(source.close)
            jobs.extend(_jobs(source, its_wants))
        _run(jobs, _do, max([threads, *(job.source.parallel for job in jobs)]))
        return sum(end - start for start, end in (job.source.chunk_range(job.index) for job in jobs))


def read_chunks(
    store: Store,
    attempt: str,
    name: str,
    facts: FileFacts,
    take: Callable[[memoryview, int], None],
    *,
    threads: int | None = None,
    fresh: bool = False,
    failed: Callable[[], None] = lambda: None,
) -> None:
    """Read a whole file and give each chunk that has its digest to `take(block, start)`, in any order.

    A block starts on a page and is whole pages long: behind the file's end it is padded. Its memory is used
    again once `take` returns, unless each is to have `fresh` memory. `take` is called in several threads, as
    many as keep the storage busy if `threads` doesn't say; each takes up to two chunks of memory. When one of
    them fails `failed` is called, as another may be waiting in `take` for what that one was to bring. Raises
    as `read_verified`, and what `take` raises.
    """
    source = _Source(store, attempt, name, facts, direct=True)

    def do(index: int, bounce: _Bounce) -> None:
        start, end = source.chunk_range(index)
        whole = (_Bounce() if fresh else bounce).view(-(-(end - start) // _PAGE) * _PAGE)
        try:
            source.read_checked(index, whole[: end - start])
            take(whole, start)
        except BaseException:
            failed()
            raise

    try:
        _run(range(len(facts.chunks)), do, max(_THREADS, source.parallel) if threads is None else threads)
    finally:
        source.close()


def _check_want(want: Want, files: Mapping[str, FileFacts], attempt: str) -> None:
    facts = files.get(want.file)
    if facts is None:
        raise Corrupt(f"{attempt}: the manifest names no file {want.file!r} but has tensors in it")
    if not 0 <= want.start <= want.end <= facts.size:
        raise Corrupt(
            f"{attempt}/{want.file}: bytes {want.start}..{want.end} lie outside of its {facts.size} bytes"
        )
    if len(want.into) != want.nbytes or want.into.readonly:
        raise ValueError(f"{want.file}: the target must be writable and hold {want.nbytes} bytes")


def _jobs(source: _Source, wants: Sequence[Want]) -> Iterator[_Job]:
    touched: dict[int, list[Want]] = {}
    for want in sorted(wants, key=lambda w: w.start):
        for index in range(want.start // CHUNK, (want.end - 1) // CHUNK + 1):
            touched.setdefault(index, []).append(want)
    for index in sorted(touched):
        yield _Job(source, index, tuple(touched[index]))


def _run(jobs: Sequence[_T], do: Callable[[_T, _Bounce], None], threads: int) -> None:
    """Do the jobs on up to `threads` threads; the first failure stops all of them and is raised."""
    todo = iter(jobs)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            bounce = _Bounce()
            while True:
                with lock:
                    if failures:
                        return
                    try:
                        job = next(todo)
                    except StopIteration:
                        return
                do(job, bounce)
        except BaseException as error:
            failures.append(error)

    number = max(1, min(threads, len(jobs)))
    workers = [threading.Thread(target=work, name=f"ckpt-read-{n}", daemon=True) for n in range(number)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _do(job: _Job, bounce: _Bounce) -> None:
    source = job.source
    start, end = source.chunk_range(job.index)
    straight = _straight_target(job, start, end)
    data = straight if straight is not None else bounce.view(end - start)
    source.read_checked(job.index, data)
    whole = np.frombuffer(data, np.uint8)
    for want in job.wants:
        if straight is not None and want is job.wants[0]:
            continue
        low, high = max(want.start, start), min(want.end, end)
        _scatter(want, low - want.start, whole[low - start : high - start])


def _scatter(want: Want, at: int, data: np.ndarray) -> None:
    """Copy `data`, which begins `at` bytes after the want's start, to where it belongs, without the GIL."""
    target = np.frombuffer(want.into, np.uint8)
    if not want.pitch:
        np.copyto(target[at : at + len(data)], data)
        return
    # A row may begin in one chunk and end in another: a part of a row, whole rows, a part of a row.
    row, column = divmod(at, want.pitch)
    while len(data):
        whole_rows = 0 if column else len(data) // want.pitch
        if whole_rows:
            source = data[: whole_rows * want.pitch].reshape(whole_rows, want.pitch)[:, : want.run]
            np.copyto(
                target[row * want.run : (row + whole_rows) * want.run].reshape(whole_rows, want.run), source
            )
            data = data[whole_rows * want.pitch :]
            row += whole_rows
            continue
        count = max(0, min(want.run - column, len(data)))
        np.copyto(target[row * want.run + column :][:count], data[:count])
        data = data[want.pitch - column :]
        row, column = row + 1, 0


def _straight_target(job: _Job, start: int, end: int) -> memoryview | None:
    """The first want's own memory if it takes the whole chunk and the chunk can be read into it directly."""
    want = job.wants[0]
    if want.pitch or want.start > start or want.end < end:
        return None
    target = want.into[start - want.start : end - want.start]
    if job.source.direct and np.frombuffer(target, np.uint8).ctypes.data % _PAGE:
        return None
    return target


class _Bounce:
    """One thread's buffer for a chunk, made when first needed."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def view(self, size: int) -> memoryview:
        if self._memory is None:
            self._memory = private_memory(CHUNK)
        return self._memory[:size]


class _Source:
    """One shard, open for reading by several threads."""

    def __init__(self, store: Store, attempt: str, name: str, facts: FileFacts, direct: bool) -> None:
        self.key = f"{attempt}/{name}"
        self.facts = facts
        self.kind = facts.digest_kind
        expected = -(-facts.size // CHUNK)
        if len(facts.chunks) != expected:
            raise Corrupt(
                f"{self.key}: the manifest has {len(facts.chunks)} chunk digests for {facts.size} bytes; "
                f"{expected} are needed"
            )
        try:
            self._opened = store.open_source(self.key, direct=direct)
        except FileNotFoundError:
            raise Corrupt(f"{self.key}: the file is missing") from None
        if self._opened.size != facts.size:
            self.close()
            raise Corrupt(
                f"{self.key}: the file has {self._opened.size} bytes, the manifest says {facts.size}"
            )

    @property
    def direct(self) -> bool:
        return self._opened.direct

    def chunk_range(self, index: int) -> tuple[int, int]:
        return index * CHUNK, min((index + 1) * CHUNK, self.facts.size)

    @property
    def parallel(self) -> int:
        return self._opened.parallel

    def read_checked(self, index: int, into: memoryview) -> None:
        """Fill `into` with a chunk that has its digest. Raises Corrupt if it has another one twice."""
        start, end = self.chunk_range(index)
        for last in (False, True):
            self._read(start, into)
            found = chunk_digest(self.kind, into)
            if found == self.facts.chunks[index]:
                return
            if last:
                raise Corrupt(
                    f"{self.key}: chunk {index} (bytes {start}..{end}) is damaged: "
                    f"its {self.kind} is {found}, the manifest says {self.facts.chunks[index]}"
                )

    def _read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`, trying again where the storage may recover and has not tried long."""
        begun = time.monotonic()
        for attempt in range(_RETRIES + 1):
            try:
                faults.point("read", self.key)
                self._opened.read_into(offset, into)
                return
            except (OSError, StorageError) as error:
                late = attempt == _RETRIES or time.monotonic() - begun > _PATIENCE_S
                if errno_of(error) not in _TRANSIENT or late:
                    cause = error if isinstance(error, OSError) else error.__cause__
                    raise StorageError(f"{self.key}: reading at byte {offset} failed: {error}") from cause
                time.sleep(0.05 * 2**attempt * (1 + random.random()))

    def close(self) -> None:
        self._opened.close()
