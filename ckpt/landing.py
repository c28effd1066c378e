"""Where checkpoint bytes land before they may touch a training state: which ranges to read, and into what.

Landing memory is never live. It holds exactly the bytes that are needed, in the order they have in the
files, so that long stretches of a file are read straight into it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt.byte_copies import bytes_of, lazy_bits
from ckpt.huge_pages import private_memory
from ckpt.manifest import Manifest, SliceEntry, TensorInfo
from ckpt.reader import Want

__all__ = ["Copy", "Piece", "land", "torch_dtype", "whole_pieces"]

_PAGE = mmap.PAGESIZE
_LONG = 1 << 20


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of one stored slice, and the view of a tensor that it fills.

    `offsets` and `lengths` count elements inside the slice; `into` has the shape `lengths`, on any device.
    With `live` its memory is in use, and must not be written before everything has been checked.
    """

    file: str
    stored: SliceEntry
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: Tensor
    live: bool


class Copy(NamedTuple):
    """A copy to make once everything has been read: `data` has the shape of `into`, and the stored dtype."""

    into: Tensor
    data: Tensor
    live: bool


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Where a piece's bytes are: `rows` runs of `run` bytes, `pitch` bytes apart, from `start` on."""

    piece: Piece
    start: int
    run: int
    pitch: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.pitch + self.run

    @property
    def nbytes(self) -> int:
        return self.rows * self.run


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a manifest names; manifests are checked to name only known ones."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def whole_pieces(manifest: Manifest, info: TensorInfo, into: Tensor, live: bool) -> Iterator[Piece]:
    """Pieces that fill a plain tensor of the stored tensor's global shape from all its slices."""
    dtype = torch_dtype(info.dtype)
    for stored in info.slices:
        view = into
        for dim, (offset, length) in enumerate(zip(stored.offsets, stored.shape, strict=True)):
            view = view.narrow(dim, offset, length)
        nowhere = (0,) * len(stored.shape)
        yield Piece(manifest.files[stored.file].name, stored, dtype, nowhere, stored.shape, view, live)


def land(pieces: Sequence[Piece]) -> tuple[list[Want], list[Copy]]:
    """What to read, and the copies to make once all of it has been read and checked.

    Contiguous CPU targets that are not live are read into directly and need no copy. All others share one
    landing region of as many bytes as they need; it is freed with the last of the copies.
    """
    wants: list[Want] = []
    landing: list[_Stretch] = []
    for stretch in (s for piece in pieces if piece.into.numel() for s in _stretches(piece)):
        if _takes_bytes(stretch.piece):
            wants.append(_want(stretch, bytes_of(stretch.piece.into).data))
        else:
            landing.append(stretch)
    groups, size = _groups(landing)
    copies: list[Copy] = []
    if size:
        region = torch.frombuffer(private_memory(size), dtype=torch.uint8)
        memory = region.numpy().data
        for group in groups:
            wants.append(group.want(memory))
            copies.extend(group.copies(region))
    return wants, copies


def _stretches(piece: Piece) -> Iterator[_Stretch]:
    shape, lengths = piece.stored.shape, piece.lengths
    partial = [d for d in range(len(shape)) if lengths[d] != shape[d]]
    last = partial[-1] if partial else 0
    # Rows are evenly spaced when the dimensions before the last partial one make one unbroken range.
    broken = [d for d in partial[:-1] if any(lengths[before] > 1 for before in range(d))]
    if broken:
        dim = next(d for d in range(len(shape)) if lengths[d] > 1)
        for i in range(lengths[dim]):
            offsets = (*piece.offsets[:dim], piece.offsets[dim] + i, *piece.offsets[dim + 1 :])
            one = (*lengths[:dim], 1, *lengths[dim + 1 :])
            yield from _stretches(
                replace(piece, offsets=offsets, lengths=one, into=piece.into.narrow(dim, i, 1))
            )
        return
    inner = piece.dtype.itemsize * math.prod(shape[last + 1 :])
    steps = [piece.dtype.itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = piece.stored.start + sum(o * step for o, step in zip(piece.offsets, steps, strict=True))
    if not shape:
        yield _Stretch(piece, start, inner, 0, 1)
        return
    rows = math.prod(lengths[:last])
    run, pitch = lengths[last] * inner, shape[last] * inner
    if run == pitch or rows == 1:
        yield _Stretch(piece, start, run * rows, 0, 1)
    else:
        yield _Stretch(piece, start, run, pitch, rows)


@dataclass(eq=False)
class _Group:
    """Stretches that adjoin in a file, and so in the landing region, from byte `at` on."""

    stretches: list[_Stretch]
    at: int = 0
    size: int = 0

    @property
    def start(self) -> int:
        return self.stretches[0].start

    def takes(self, stretch: _Stretch) -> bool:
        first = self.stretches[0]
        return (
            not first.pitch
            and not stretch.pitch
            and first.piece.file == stretch.piece.file
            and stretch.start == self.start + self.size
            and self.size % stretch.piece.dtype.itemsize == 0
        )

    def place(self, at: int) -> None:
        self.at = -(-at // 64) * 64
        # The same place in a page as in the file lets whole chunks be read straight into the region.
        if self.size >= _LONG and self.start % 16 == 0:
            self.at += (self.start - self.at) % _PAGE

    def want(self, memory: memoryview) -> Want:
        first = self.stretches[0]
        end = first.end if first.pitch else self.start + self.size
        into = memory[self.at : self.at + self.size]
        return Want(first.piece.file, self.start, end, into, first.run, first.pitch)

    def copies(self, region: Tensor) -> Iterator[Copy]:
        at = self.at
        for stretch in self.stretches:
            piece, data = stretch.piece, region[at : at + stretch.nbytes]
            yield _copy(piece, data.view(piece.dtype).view(piece.lengths))
            at += stretch.nbytes


def _groups(stretches: Sequence[_Stretch]) -> tuple[list[_Group], int]:
    """The stretches, grouped and placed in file order, and the bytes that the region needs."""
    groups: list[_Group] = []
    for stretch in sorted(stretches, key=lambda s: (s.piece.file, s.start)):
        if not groups or not groups[-1].takes(stretch):
            groups.append(_Group([]))
        groups[-1].stretches.append(stretch)
        groups[-1].size += stretch.nbytes
    size = 0
    for group in groups:
        group.place(size)
        size = group.at + group.size
    return groups, size


def _takes_bytes(piece: Piece) -> bool:
    into = piece.into
    plain = into.device.type == "cpu" and into.is_contiguous() and not lazy_bits(into)
    return plain and not piece.live and into.dtype == piece.dtype


def _want(stretch: _Stretch, into: memoryview) -> Want:
    return Want(stretch.piece.file, stretch.start, stretch.end, into, stretch.run, stretch.pitch)


def _copy(piece: Piece, data: Tensor) -> Copy:
    """In a form that `copy_` takes for every dtype, and for expanded targets."""
    into = piece.into
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if size > 1 and stride == 0:
            into, data = into.narrow(dim, 0, 1), data.narrow(dim, 0, 1)
    if into.dtype == data.dtype and into.dtype.itemsize == 1 and not lazy_bits(into):
        into, data = into.view(torch.uint8), data.view(torch.uint8)
    return Copy(into, data, piece.live)
