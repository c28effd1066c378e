"""Large files in a folder: a new one written, or a finished one read, by several threads at once."""

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ckpt.direct_io import ShardFile
from ckpt.errors import Corrupt
from ckpt.stores.system_errors import reporting

_PAGE = mmap.PAGESIZE


class FileSink:
    """A new file, written past the page cache where the file system takes that. See `ckpt.store.Sink`."""

    reread = False

    def __init__(self, path: Path, size: int, direct: bool, say: Callable[[str], None]) -> None:
        self._path = path
        with reporting("write", path):
            self._file = ShardFile(path, size, direct, say)

    @property
    def direct(self) -> bool:
        """Whether blocks still go past the page cache."""
        return self._file.direct

    def write(self, block: memoryview, offset: int) -> None:
        """Write whole pages, from page-aligned memory, at a page-aligned offset."""
        with reporting("write", self._path):
            self._file.write(block, offset)

    def abandon(self) -> None:
        """Nobody waits for anybody in a file."""

    def finish(self) -> None:
        """Cut what pads the last page, sync file and folder, and check the size."""
        with reporting("write", self._path):
            self._file.finish()

    def close(self) -> None:
        """Close the file. One that was not finished stays until it is deleted; no part vouches for it."""
        self._file.close()


class FileSource:
    """A file, read past the page cache where the file system takes that. See `ckpt.store.Source`."""

    parallel = 1

    def __init__(self, path: Path, direct: bool) -> None:
        self._path = path
        self.direct = direct
        self._buffered_fd = -1
        self._direct_fd = -1
        self._cached = False
        with reporting("read", path):
            # O_NONBLOCK: a pipe in the file's place must not hang the reader.
            self._buffered_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._buffered_fd)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise Corrupt(f"{path} is not a plain file")
        if direct:
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                self.direct = False

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        with reporting("read", self._path):
            done = self._read_direct(start, into) if self.direct else 0
            if done < len(into):
                self._read_cached(start + done, into[done:])

    def _read_cached(self, start: int, into: memoryview) -> None:
        self._cached = True
        done = 0
        while done < len(into):
            got = os.preadv(self._buffered_fd, [into[done:]], start + done)
            if got == 0:
                raise Corrupt(f"{self._path} ends at byte {start + done}, before {start + len(into)}")
            done += got
        os.posix_fadvise(self._buffered_fd, start, done, os.POSIX_FADV_DONTNEED)

    def _read_direct(self, start: int, into: memoryview) -> int:
        """Bytes read past the page cache: whole pages only; a file's tail is left to the buffered read."""
        whole = len(into) // _PAGE * _PAGE
        done = 0
        while done < whole:
            try:
                got = os.preadv(self._direct_fd, [into[done:whole]], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                return done
            done += got
            if got == 0 or got % _PAGE:
                break
        return done

    def close(self) -> None:
        """Close the file; what was read through the page cache is dropped from it."""
        if self._cached and self._buffered_fd >= 0:
            # For the whole file: what one thread had read ahead of its range, and the large pages that two
            # ranges share, were in another thread's use when their own range was dropped.
            os.posix_fadvise(self._buffered_fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for fd in (self._buffered_fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._buffered_fd = self._direct_fd = -1
