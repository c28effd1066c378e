"""Looks whether the state stayed what it was at the call while it was copied in the background.

At the call, 64 bytes are read at up to 256 fixed places spread over the state; after the copy they
are compared with what arrived in the arena. The version counters of up to 2048 tensors, which
in-place operations move (but `.data` writes and fused optimizers don't), are compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

PLACES = 256
WIDTH = 64
VERSIONS = 2048
_version = attrgetter("_version")


class Taken(NamedTuple):
    """What the state looked like at the call: sampled bytes on their device(s), version counters."""

    samples: tuple[Tensor, ...]
    versions: list[int]


class Guard:
    """Fixed sample places over pairs of live memory and its copy in the arena (CPU), equal in shape
    and dtype.
    """

    def __init__(self, keys: Sequence[str], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """`sources` are live; `copies[i]` is where `sources[i]` is copied to; `keys` name them in reports."""
        self._keys = list(keys)
        step = -(-len(sources) // VERSIONS) or 1
        self._versioned = list(sources[::step])
        self._versioned_keys = list(keys[::step])
        self._places: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        flat = [i for i, s in enumerate(sources) if s.is_contiguous() and s.numel() and not _lazy_bits(s)]
        total = sum(sources[i].nbytes for i in flat)
        spacing = max(1, total // PLACES)
        at, due = 0, 0
        for i in flat:
            live, copy = _as_bytes(sources[i]), _as_bytes(copies[i])
            while due < at + len(live):
                start = max(0, min(due - at, len(live) - WIDTH))
                place = (i, live[start : start + WIDTH], copy[start : start + WIDTH])
                self._places.setdefault(live.device, []).append(place)
                due += spacing
            at += len(live)

    def take(self) -> Taken:
        """Read the samples and versions now; on CUDA the read is queued on the current stream."""
        samples = tuple(torch.cat([live for _, live, _ in places]) for places in self._places.values())
        return Taken(samples, list(map(_version, self._versioned)))

    def written_to(self, taken: Taken) -> str | None:
        """The tensor whose version counter moved since `take`, or None; to be asked before the
        optimizer moves.
        """
        versions = list(map(_version, self._versioned))
        if versions == taken.versions:
            return None
        return next(
            k
            for k, then, now in zip(self._versioned_keys, taken.versions, versions, strict=True)
            if then != now
        )

    def differs(self, taken: Taken) -> str | None:
        """The tensor whose copy is not what `take` saw, or None; to be asked when all is copied. May
        wait for CUDA.
        """
        for sample, places in zip(taken.samples, self._places.values(), strict=True):
            then, now = sample.cpu(), torch.cat([copy for _, _, copy in places])
            if not torch.equal(then, now):
                return self._keys[self._first_difference(then, now, places)]
        return None

    @staticmethod
    def _first_difference(then: Tensor, now: Tensor, places: list[tuple[int, Tensor, Tensor]]) -> int:
        at = 0
        for i, live, _ in places:
            if not torch.equal(then[at : at + len(live)], now[at : at + len(live)]):
                return i
            at += len(live)
        return places[0][0]


def _lazy_bits(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
