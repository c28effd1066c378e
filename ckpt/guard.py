"""Looks whether the state stayed what it was at the call while it was copied in the background.

At the call, 64 bytes are read at up to 256 fixed places spread over the state; after the copy they
are compared with what arrived in the arena. The version counters of up to 2048 tensors, which
in-place operations move (but `.data` writes and fused optimizers don't), are compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ckpt.gather import Gather

PLACES = 256
WIDTH = 64
VERSIONS = 2048
_version = attrgetter("_version")


class Taken(NamedTuple):
    """What the state looked like at the call: sampled bytes of the host and of each device, version
    counters.
    """

    samples: tuple[bytes | Tensor, ...]
    versions: list[int]


class _Place(NamedTuple):
    """One place, as uint8[up to 64] of the live memory and of its copy; `number` of its tensor."""

    number: int
    live: Tensor
    copy: Tensor


class _Samples(Protocol):
    """The places of one device."""

    def take(self) -> bytes | Tensor:
        """What lies at all live places now; on CUDA the read is queued on the current stream."""

    def differing(self, taken: bytes | Tensor) -> int | None:
        """The number of a tensor whose copy is not what was taken, or None. May wait for CUDA."""


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
        by_device: dict[torch.device, list[_Place]] = {}
        for place in _places(sources, copies):
            by_device.setdefault(place.live.device, []).append(place)
        self._samples: list[_Samples] = [
            _OnHost(places) if device.type == "cpu" else _OnDevice(places)
            for device, places in by_device.items()
        ]

    def take(self) -> Taken:
        """Read the samples and versions now; on CUDA the read is queued on the current stream."""
        samples = tuple(samples.take() for samples in self._samples)
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
        for samples, then in zip(self._samples, taken.samples, strict=True):
            if (number := samples.differing(then)) is not None:
                return self._keys[number]
        return None


class _OnHost:
    """Places in the host's memory, read without touching a tensor of any of them."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places  # keeps the memory there, whatever becomes of the tensors
        self._ends = list(accumulate(len(place.live) for place in places))
        self._live = Gather([(place.live.data_ptr(), len(place.live)) for place in places])
        self._copies = Gather([(place.copy.data_ptr(), len(place.copy)) for place in places])

    def take(self) -> bytes:
        return self._live.read()

    def differing(self, taken: bytes | Tensor) -> int | None:
        now = self._copies.read()
        if now == taken:
            return None
        at = next(i for i, (then, new) in enumerate(zip(taken, now, strict=True)) if then != new)
        return next(place.number for place, end in zip(self._places, self._ends, strict=True) if at < end)


class _OnDevice:
    """Places in a device's memory."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places

    def take(self) -> Tensor:
        return torch.cat([place.live for place in self._places])

    def differing(self, taken: bytes | Tensor) -> int | None:
        assert isinstance(taken, Tensor)
        then, at = taken.cpu(), 0
        if torch.equal(then, torch.cat([place.copy for place in self._places])):
            return None
        for number, live, copy in self._places:
            if not torch.equal(then[at : at + len(live)], copy):
                return number
            at += len(live)
        return None


def _places(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> list[_Place]:
    """At equal distances through all that is contiguous, each on one cache line where it can be."""
    flat = [i for i, s in enumerate(sources) if s.is_contiguous() and s.numel() and not _lazy_bits(s)]
    spacing = max(1, sum(sources[i].nbytes for i in flat) // PLACES)
    found: list[_Place] = []
    at, due = 0, 0
    for i in flat:
        live, copy = _as_bytes(sources[i]), _as_bytes(copies[i])
        while due < at + len(live):
            start = due - at - (live.data_ptr() + due - at) % WIDTH
            start = max(0, min(start, len(live) - WIDTH))
            found.append(_Place(i, live[start : start + WIDTH], copy[start : start + WIDTH]))
            due += spacing
        at += len(live)
    return found


def _lazy_bits(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
