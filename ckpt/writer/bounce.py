"""Buffers in huge pages, through which a shard goes to the disk where its arena has small pages only.

A chunk is copied and hashed piece by piece, so that the hash finds each piece in the processor's cache.
"""

from __future__ import annotations

import threading

from ckpt import digest, huge_pages

_PIECE = 256 << 10


class Buffers:
    """A few equal buffers of `size` bytes, kept for the next shard; methods may be called from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @staticmethod
    def pay() -> bool:
        """Whether going through a buffer costs less than writing small pages does."""
        return huge_pages.huge_page() > 0 and not huge_pages.shared_is_huge()

    def take(self) -> memoryview:
        """A buffer, to be given back. Raises OSError (ENOMEM)."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return huge_pages.private_memory(self.size)

    def give_back(self, buffer: memoryview) -> None:
        """Keep a buffer for whoever takes one next."""
        with self._lock:
            self._free.append(buffer)


def copy_hashing(source: memoryview, target: memoryview, hasher: digest.Hasher, hashed: int) -> None:
    """Copy `source` to the start of `target`, feeding the copy's first `hashed` bytes to `hasher`."""
    for start in range(0, len(source), _PIECE):
        end = min(start + _PIECE, len(source))
        target[start:end] = source[start:end]
        if start < hashed:
            hasher.update(target[start : min(end, hashed)])
