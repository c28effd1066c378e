"""Looks whether the state stayed what it was at the call while it was copied in the background.

At the call, up to 64 bytes are read at each of at most 256 fixed places: one in every tensor, the rest
spread over the state by its bytes. After the copy they are compared with what arrived in the arena. Version
counters, which in-place operations move (but `.data` writes and NumPy views don't), are compared as well:
those of 2048 tensors from the call on, the others from the beginning of the copy on.

That makes it unlikely that a change goes unseen; it proves nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ckpt.byte_copies import lazy_bits
from ckpt.gather import Gather

PLACES = 256
WIDTH = 64
VERSIONS = 2048
_GOLDEN = 0.6180339887498949
_version = attrgetter("_version")


class Taken(NamedTuple):
    """What the state looked like at the call: sampled bytes of the host and of each device, version
    counters. `later` is filled by `Guard.note`.
    """

    samples: tuple[bytes | Tensor, ...]
    versions: list[int]
    later: list[int]


class _Place(NamedTuple):
    """`length` elements of tensor `number` that adjoin in its memory and in its copy.

    They begin `offset` elements from the live tensor's first one, and `copied` elements from the copy's.
    """

    number: int
    copied: int
    offset: int
    length: int


class _Samples(Protocol):
    """The places of one device."""

    def take(self) -> bytes | Tensor:
        """What lies at all live places now; on CUDA the read is queued on the current stream."""

    def differing(self, taken: bytes | Tensor) -> int | None:
        """The number of a tensor whose copy is not what was taken, or None. May wait for CUDA."""


class Guard:
    """Fixed sample places over pairs of live memory, of any strides, and its contiguous copy in the arena
    (CPU), equal in shape and dtype.
    """

    def __init__(self, keys: Sequence[str], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """`sources` are live; `copies[i]` is where `sources[i]` is copied to; `keys` name them in reports."""
        self._keys = list(keys)
        counting = [i for i, source in enumerate(sources) if not source.is_inference()]
        at_call = _evenly(counting, VERSIONS)
        later = sorted(set(counting).difference(at_call))
        self._at_call = _Versions(keys, sources, at_call)
        self._later = _Versions(keys, sources, later)
        by_device: dict[torch.device, list[_Place]] = {}
        for place in _places(sources):
            by_device.setdefault(sources[place.number].device, []).append(place)
        self._samples: list[_Samples] = [
            (_OnHost if device.type == "cpu" else _OnDevice)(places, sources, copies)
            for device, places in by_device.items()
        ]

    def take(self) -> Taken:
        """Read the samples and up to `VERSIONS` versions now; on CUDA the read is queued on the current
        stream.
        """
        return Taken(tuple(samples.take() for samples in self._samples), self._at_call.read(), [])

    def note(self, taken: Taken) -> None:
        """Read the versions that `take` had no time for; to be called right before the copy begins."""
        taken.later[:] = self._later.read()

    def written_to(self, taken: Taken) -> str | None:
        """The tensor whose version counter moved since `take` (or `note`), or None; to be asked before
        the optimizer moves.
        """
        moved = self._at_call.moved(taken.versions)
        if moved is None and taken.later:
            moved = self._later.moved(taken.later)
        return moved

    def differs(self, taken: Taken) -> str | None:
        """The tensor whose copy is not what `take` saw, or None; to be asked when all is copied. May
        wait for CUDA.
        """
        for samples, then in zip(self._samples, taken.samples, strict=True):
            if (number := samples.differing(then)) is not None:
                return self._keys[number]
        return None


class _Versions:
    """The version counters of some of the tensors."""

    def __init__(self, keys: Sequence[str], sources: Sequence[Tensor], numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self._keys = [keys[i] for i in numbers]
        self._tensors = [sources[i] for i in numbers]

    def read(self) -> list[int]:
        return list(map(_version, self._tensors))

    def moved(self, then: list[int]) -> str | None:
        now = self.read()
        if now == then:
            return None
        return next(k for k, old, new in zip(self._keys, then, now, strict=True) if old != new)


class _OnHost:
    """Places in the host's memory, read without touching a tensor of any of them."""

    def __init__(self, places: list[_Place], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._numbers = [place.number for place in places]
        # The memory stays there, whatever becomes of the tensors.
        self._held = [(sources[i].detach(), copies[i].detach()) for i in dict.fromkeys(self._numbers)]
        here, there = [], []
        for number, copied, offset, length in places:
            source, copy, size = sources[number], copies[number], sources[number].itemsize
            here.append((source.data_ptr() + offset * size, length * size))
            there.append((copy.data_ptr() + copied * size, length * size))
        self._ends = list(accumulate(nbytes for _, nbytes in here))
        self._live, self._copies = Gather(here), Gather(there)

    def take(self) -> bytes:
        return self._live.read()

    def differing(self, taken: bytes | Tensor) -> int | None:
        now = self._copies.read()
        if now == taken:
            return None
        at = next(i for i, (then, new) in enumerate(zip(taken, now, strict=True)) if then != new)
        return self._numbers[bisect_right(self._ends, at)]


class _OnDevice:
    """Places in a device's memory."""

    def __init__(self, places: list[_Place], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._numbers = [place.number for place in places]
        self._live, self._copies = [], []
        for number, copied, offset, length in places:
            source, copy = sources[number].detach(), copies[number].detach().view(-1)
            run = source.as_strided((length,), (1,), source.storage_offset() + offset)
            self._live.append(run.view(torch.uint8))
            self._copies.append(copy[copied : copied + length].view(torch.uint8))

    def take(self) -> Tensor:
        return torch.cat(self._live)

    def differing(self, taken: bytes | Tensor) -> int | None:
        assert isinstance(taken, Tensor)
        then, at = taken.cpu(), 0
        if torch.equal(then, torch.cat(self._copies)):
            return None
        for number, copy in zip(self._numbers, self._copies, strict=True):
            if not torch.equal(then[at : at + len(copy)], copy):
                return number
            at += len(copy)
        return None


def _places(sources: Sequence[Tensor]) -> list[_Place]:
    """At most `PLACES`: in the middle of every tensor (of an even selection, if there are too many), then
    through all of them by their bytes.
    """
    # The bytes of a lazily conjugated or negated tensor are not those of its copy.
    filled = [i for i, s in enumerate(sources) if s.numel() and not lazy_bits(s)]
    chosen = _evenly(filled, PLACES)
    found = [_place(i, sources[i], sources[i].numel() // 2) for i in chosen]
    ends = list(accumulate(sources[i].nbytes for i in filled))
    for k in range(PLACES - len(chosen) if filled else 0):
        # Not at equal distances, which could all hit the same column of a matrix.
        at = int((k + k * _GOLDEN % 1) * ends[-1] / (PLACES - len(chosen)))
        which = bisect_right(ends, at)
        source = sources[filled[which]]
        found.append(_place(filled[which], source, (at - ends[which] + source.nbytes) // source.itemsize))
    return list(dict.fromkeys(found))


def _place(number: int, source: Tensor, index: int) -> _Place:
    """What adjoins the element at a logical index on its cache line, live as in the contiguous copy."""
    offset, left = 0, index
    run, unbroken = 1, True
    for size, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
        left, at = divmod(left, size)
        offset += at * stride
        unbroken = unbroken and (size == 1 or stride == run)
        run *= size if unbroken else 1
    width = WIDTH // source.itemsize
    length, within = min(width, run), index % run
    start = within - (source.data_ptr() // source.itemsize + offset) % width
    back = within - max(0, min(start, run - length))
    return _Place(number, index - back, offset - back, length)


def _evenly(numbers: Sequence[int], most: int) -> list[int]:
    """All of them, or `most` at equal distances."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[k * len(numbers) // most] for k in range(most)]
