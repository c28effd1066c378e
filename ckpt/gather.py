"""Reads many small places of this process's memory in one go.

Python objects for each place would lie all over memory themselves, and after a training step none of that is
in the processor's cache: looking at 256 tensors takes several times as long as reading 64 bytes behind each.
Here one table holds all addresses, and one system call follows them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence

MOST = 1024
"""Places that one read can take (IOV_MAX of Linux)."""


class _Place(ctypes.Structure):
    """One `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Gather:
    """Fixed places in memory of this process, up to `MOST`. Who makes it keeps the memory alive.

    Not for several threads at once.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """`places` are addresses and lengths in bytes. Raises ValueError for too many, OSError."""
        if len(places) > MOST:
            raise ValueError(f"{len(places)} places are more than one read can take ({MOST})")
        self.nbytes = sum(nbytes for _, nbytes in places)
        self._table = (_Place * len(places))(*(_Place(*place) for place in places))
        # A system call can read from anywhere only by writing to somewhere: to memory that is a file.
        self._fd = os.memfd_create("ckpt-samples", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._pwritev = ctypes.CDLL(None, use_errno=True).pwritev
        self._pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        self._pwritev.restype = ctypes.c_ssize_t

    def read(self) -> bytes:
        """What lies at all places now, one after the other. Raises OSError if one is no memory any more."""
        done = self._pwritev(self._fd, self._table, len(self._table), 0)
        if done != self.nbytes:
            # Only a call that wrote nothing sets errno.
            code = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(
                code,
                f"memory that was to be looked at could not be read: {os.strerror(code)} after "
                f"{max(0, done)} of {self.nbytes} bytes (was a storage of the state freed or resized?)",
            )
        return os.pread(self._fd, self.nbytes, 0)
