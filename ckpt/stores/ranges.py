"""Reading one object by ranges, several at once."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ckpt.errors import Corrupt, StorageError
from ckpt.stores.multipart import Reporting

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["RangeSource"]


class RangeSource:
    """An object at `path` of an obstore store. See `ckpt.store.Source`.

    Looked at once, when it is opened, for its size. Raises FileNotFoundError, StorageError.
    """

    direct = False

    def __init__(self, store: ObjectStore, path: str, reporting: Reporting) -> None:
        import obstore

        self._store = store
        self._path = path
        self._reporting = reporting
        with reporting("read"):
            self.size = obstore.head(store, path)["size"]

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        Raises Corrupt if the object ends before, StorageError, with an `OSError` of EIO as its cause if the
        answer is cut.
        """
        import numpy as np
        import obstore

        if start + len(into) > self.size:
            raise Corrupt(f"{self._path} ends at byte {self.size}, before {start + len(into)}")
        if not into:
            return
        with self._reporting("read"):
            data = obstore.get_range(self._store, self._path, start=start, length=len(into))
        if len(data) != len(into):
            cause = OSError(errno.EIO, f"{len(data)} of {len(into)} bytes came")
            raise StorageError(f"can't read {self._path} at byte {start}: {cause.strerror}") from cause
        # NumPy copies without the interpreter's lock.
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(memoryview(data), np.uint8))

    def close(self) -> None:
        """Nothing is held open between reads."""
