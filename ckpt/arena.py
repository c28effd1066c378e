"""The arena: page-aligned shared memory in which one shard is staged, byte for byte as its file will be.

A memfd holds the shard (rounded up to whole pages) and, in one more page behind it, the control page, whose
first eight bytes are the watermark: how many leading bytes of the shard are staged. The trainer maps it for
writing, the writer process gets the file descriptor and maps it for reading.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

PAGE = 4096
_TOUCH_STEP = 64 << 20
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MARK = struct.Struct("=Q")


def pages(size: int) -> int:
    """`size` in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Arena:
    """Shared memory for one shard of up to `size` bytes: `create` it, or `map_for_reading` a received one."""

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        self.fd = fd
        self.size = size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, pages(size) + PAGE, mmap.MAP_SHARED, protection)
        self._whole = memoryview(self._map)
        self._fence = threading.Lock()
        self._closing = threading.Event()
        self._toucher: threading.Thread | None = None

    @classmethod
    def create(cls, size: int) -> "Arena":
        """Reserve shared memory for a shard of `size` bytes (not yet backed by pages: see `touch`).

        Raises ValueError for a size that is not positive, OSError (ENOMEM) if the address space is full.
        """
        if size <= 0:
            raise ValueError(f"an arena needs a positive size in bytes, got {size}")
        fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, pages(size) + PAGE)
            # A fixed size: the reader of the descriptor can never be made to fault beyond the end.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            arena = cls(fd, size, writable=True)
        except BaseException:
            os.close(fd)
            raise
        for advice in (_MADV_HUGEPAGE, _MADV_DONTDUMP):
            try:
                arena._map.madvise(advice)
            except OSError:
                continue  # a kernel without this kind of advice works as well, only not as fast
        return arena

    @classmethod
    def map_for_reading(cls, fd: int, size: int) -> "Arena":
        """Map an arena received by file descriptor; the arena owns `fd` from here on.

        Raises ValueError if the descriptor does not hold a shard of `size` bytes and its control page.
        """
        if size <= 0 or os.fstat(fd).st_size != pages(size) + PAGE:
            raise ValueError(f"this descriptor holds {os.fstat(fd).st_size} bytes, not an arena for {size}")
        return cls(fd, size, writable=False)

    @property
    def buffer(self) -> memoryview:
        """The shard's bytes: a flat memoryview of `size` bytes that starts on a page."""
        return self._whole[: self.size]

    @property
    def padded(self) -> memoryview:
        """The shard's bytes up to the end of its last page, as O_DIRECT wants them."""
        return self._whole[: pages(self.size)]

    @property
    def watermark(self) -> int:
        """How many leading bytes of the shard are staged."""
        return int(_MARK.unpack_from(self._whole, pages(self.size))[0])

    @watermark.setter
    def watermark(self, nbytes: int) -> None:
        # On weakly ordered CPUs the staged bytes must be visible before the mark: the first release orders
        # them, the second acquire keeps the mark from moving before it.
        with self._fence:
            pass
        with self._fence:
            _MARK.pack_into(self._whole, pages(self.size), nbytes)

    def touch(self) -> Future[None]:
        """Back the whole arena by memory in a background thread, so that the first save pays no page faults.

        Keeps what is already staged. The future is done when all pages are there, or holds the OSError.
        """
        done: Future[None] = Future()
        self._toucher = threading.Thread(target=_settle, args=(done, self._populate), daemon=True)
        self._toucher.start()
        return done

    def _populate(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        anchor = ctypes.c_char.from_buffer(self._map)
        total = pages(self.size) + PAGE
        for start in range(0, total, _TOUCH_STEP):
            if self._closing.is_set():
                return
            length = min(_TOUCH_STEP, total - start)
            if madvise(ctypes.addressof(anchor) + start, length, _MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, f"no memory for {total} bytes of staging arena: {os.strerror(code)}")
            os.posix_fallocate(self.fd, start, length)  # kernels before 5.14: allocate without mapping

    def close(self) -> None:
        """Unmap and close; views of `buffer` that are still held keep their memory until they go."""
        self._closing.set()
        if self._toucher is not None:
            self._toucher.join()
        if self.fd < 0:
            return
        try:
            self._whole.release()
            self._map.close()
        except BufferError:
            pass  # somebody holds a view (a tensor over the arena): the memory goes with the last of them
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> "Arena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settle(done: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
