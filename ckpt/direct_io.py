"""Writing one large file past the page cache: O_DIRECT where the file system takes it, durable at the end.

Blocks start on a page and are whole pages long; the last one is padded, and `finish` cuts the file to its
size. Where O_DIRECT is refused the file falls back to ordinary writes by itself, remembers that for the file
system, and drops the pages it leaves in the cache, so that a checkpoint never pushes out what others cache.
"""

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt.faults import point

PAGE = 4096
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)

_buffered_devices: set[int] = set()
_lock = threading.Lock()


class ShardFile:
    """A new file of `size` bytes at `path`, to be written in any order by any number of threads.

    Space is reserved at once where the file system can, so a full disk is found before anything is written.
    `say` gets one line when O_DIRECT has to be given up. Raises OSError; FileExistsError if `path` is there.
    """

    def __init__(self, path: Path, size: int, direct: bool, say: Callable[[str], None]) -> None:
        self.path = path
        self.size = size
        self._say = say
        self.direct = direct and path.parent.stat().st_dev not in _buffered_devices
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            point("open", path)
            self._fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o666)
        except OSError as error:
            if not self.direct or error.errno not in _REFUSALS:
                raise
            # The kernel makes the file before the file system refuses the flag.
            with suppress(FileNotFoundError):
                path.unlink()
            self._fd = os.open(path, flags, 0o666)
            self._give_up_direct(error)
        try:
            _reserve(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, block: memoryview, offset: int) -> None:
        """Write `block` (whole pages, from page-aligned memory) at the page-aligned `offset`, all of it."""
        done = 0
        while done < len(block):
            try:
                point("pwrite", self.path)
                done += os.pwrite(self._fd, block[done:], offset + done)
            except OSError as error:
                if not self.direct or error.errno not in _REFUSALS:
                    raise
                self._give_up_direct(error)
        if not self.direct:
            # Starts the write-back of this block now, so that the final fsync has little left to wait for.
            _drop_cache(self._fd, offset, len(block))

    def finish(self) -> None:
        """Cut the padding, make file and folder durable, and check the size; then the file is closed.

        Raises OSError from any of it. A failed fsync must not be tried again on this file: the kernel may
        have dropped the dirty pages, so only a file written anew can be trusted.
        """
        point("ftruncate", self.path)
        os.ftruncate(self._fd, self.size)
        point("fsync", self.path)
        os.fsync(self._fd)
        if not self.direct:
            _drop_cache(self._fd, 0, 0)
        found = os.fstat(self._fd).st_size
        if found != self.size:
            raise OSError(
                errno.EIO, f"{self.path} has {found} bytes after its fsync, {self.size} were written"
            )
        self.close()
        point("fsync-folder", self.path.parent)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the file, durable or not; no write may be in progress."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _give_up_direct(self, cause: OSError) -> None:
        with _lock:
            device = os.fstat(self._fd).st_dev
            known = device in _buffered_devices
            _buffered_devices.add(device)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False
        if not known:
            self._say(
                f"{self.path.parent}: O_DIRECT is refused here ({cause.strerror}); "
                "writing through the page cache"
            )


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user can still write on the file system of `folder`."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _reserve(fd: int, size: int) -> None:
    # The plain system call: the C library's posix_fallocate writes into every block where it lacks support.
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate(fd, 0, 0, max(size, 1)) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            # Not supported here: a file of full length at least lets writers run in parallel.
            os.ftruncate(fd, size)
            return


def _drop_cache(fd: int, offset: int, length: int) -> None:
    with suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
