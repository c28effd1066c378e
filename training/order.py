"""Which sample comes when: pure functions of (seed, epoch), the same on every machine and NumPy version."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np

WORD = (1 << 64) - 1


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The permutation of ``range(size)`` (int64) that epoch ``epoch`` goes through.

    Built on the raw stream of Philox, which NumPy promises never to change, and a stable sort.
    """
    keys = np.random.Philox(key=(epoch & WORD) << 64 | seed & WORD).random_raw(size)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def samples(seed: int, size: int, start: int, count: int) -> list[tuple[int, int]]:
    """``(epoch, index)`` of ``count`` samples from position ``start`` on.

    Positions count samples since the beginning of the run. Epochs follow each other without a gap: a batch
    may hold the end of one and the beginning of the next.
    """
    found = []
    for position in range(start, start + count):
        epoch, place = divmod(position, size)
        found.append((epoch, int(epoch_order(seed, epoch, size)[place])))
    return found


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64 bits for all that is random about one sample in one epoch."""
    packed = struct.pack("<3Q", seed & WORD, epoch & WORD, index & WORD)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """A generator of its own for one sample in one epoch."""
    return np.random.Generator(np.random.Philox(key=sample_seed(seed, epoch, index)))
