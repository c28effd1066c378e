"""Reading one object by ranges, several at once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt.errors import Corrupt, StorageError
from ckpt.stores.multipart import Call

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["RangeSource"]


class RangeSource:
    """An object at `path` of the obstore store that `store` returns. See `ckpt.store.Source`.

    Looked at once, when it is opened, for its size. `parallel` reads at once keep the storage busy. Raises
    FileNotFoundError, StorageError.
    """

    direct = False

    def __init__(self, store: Callable[[], ObjectStore], path: str, call: Call, *, parallel: int) -> None:
        import obstore

        self._store = store
        self._path = path
        self._call = call
        self.parallel = parallel
        self.size = call("read", lambda: obstore.head(store(), path))["size"]

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises Corrupt if the object ends before, StorageError
        also if the answer is cut.
        """
        import numpy as np
        import obstore

        length = len(into)
        if start + length > self.size:
            raise Corrupt(f"{self._path} ends at byte {self.size}, before {start + length}")
        if not length:
            return
        data = self._call(
            "read", lambda: obstore.get_range(self._store(), self._path, start=start, length=length)
        )
        if len(data) != length:
            cause = OSError(errno.EIO, f"{len(data)} of {length} bytes came")
            raise StorageError(f"can't read {self._path} at byte {start}: {cause.strerror}") from cause
        # NumPy copies without the interpreter's lock.
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(memoryview(data), np.uint8))

    def close(self) -> None:
        """Nothing is held open between reads."""
