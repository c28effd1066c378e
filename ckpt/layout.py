"""Where each slice lies in a shard file, which is a valid safetensors file whose data starts on a 4 KiB
boundary.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.dtypes import CODES, DTYPES, dtype
from ckpt.errors import Corrupt, StateError

ALIGNMENT = 4096
"""Bytes; data starts on a multiple of it, so that the file can be written and read past the page cache."""

MAX_HEADER = 100_000_000
"""Bytes of JSON that safetensors itself takes at most."""

_META = "__metadata__"
_BYTES_META = "stored_as_bytes"


@dataclass(frozen=True)
class Slice:
    """A box of a tensor: `shape` elements from `offsets` on, of a tensor of `global_shape`; dtype by torch's
    name.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the slice takes in the file."""
        return math.prod(self.shape) * dtype(self.dtype, self.key).itemsize


@dataclass(frozen=True)
class Placed:
    """A slice and its byte range `[start, end)` in the shard file, counted from the file's start."""

    slice: Slice
    start: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """A shard file: its whole header, its size in bytes, and its slices in the order they lie in it, without
    gaps.
    """

    header: bytes
    size: int
    placed: tuple[Placed, ...]


class Stored(NamedTuple):
    """One entry of a shard's header: dtype by torch's name, shape, byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def file_key(item: Slice) -> str:
    """The name of a slice in its file: the tensor's own if whole, else `key@offsets`, as in `w@0,128`."""
    whole = item.shape == item.global_shape and not any(item.offsets)
    # The last '@' always parts key and offsets, so a key that holds one itself is written with its offsets.
    if whole and "@" not in item.key and item.key != _META:
        return item.key
    return f"{item.key}@{','.join(map(str, item.offsets))}"


def plan_shard(slices: Sequence[Slice]) -> ShardLayout:
    """Lay the slices out: largest element size first, else in the order given, packed; empty ones take no
    place.

    Raises StateError for a slice that is out of its tensor's bounds, twice the same, or of a dtype that can't
    be stored.
    """
    for item in slices:
        _check(item)
    solid = [item for item in slices if math.prod(item.shape) > 0]
    # Every group's total is a multiple of its element size, so each later and smaller one starts aligned as
    # well.
    solid.sort(key=lambda item: -dtype(item.dtype).itemsize)
    header: dict[str, Any] = {}
    as_bytes: dict[str, Any] = {}
    ranges: list[tuple[int, int]] = []
    at = 0
    for item in solid:
        kind, name, end = dtype(item.dtype), file_key(item), at + item.nbytes
        if name in header:
            raise StateError(f"{item.key}: the slice at {item.offsets} is given twice")
        shape = list(item.shape)
        if kind.as_bytes:
            as_bytes[name] = {"dtype": kind.name, "shape": shape}
            shape = [*shape, kind.itemsize]
        header[name] = {"dtype": kind.code, "shape": shape, "data_offsets": [at, end]}
        ranges.append((at, end))
        at = end
    raw = _header_bytes(header, as_bytes)
    placed = (Placed(item, len(raw) + a, len(raw) + b) for item, (a, b) in zip(solid, ranges, strict=True))
    return ShardLayout(raw, len(raw) + at, tuple(placed))


def _check(item: Slice) -> None:
    dtype(item.dtype, item.key)
    if not len(item.global_shape) == len(item.offsets) == len(item.shape):
        raise StateError(
            f"{item.key}: offsets {item.offsets} and shape {item.shape} don't fit {item.global_shape}"
        )
    for size, offset, count in zip(item.global_shape, item.offsets, item.shape, strict=True):
        if offset < 0 or count < 0 or offset + count > size:
            raise StateError(
                f"{item.key}: the slice of shape {item.shape} at {item.offsets} "
                f"is outside of {item.global_shape}"
            )


def _header_bytes(header: dict[str, Any], as_bytes: dict[str, Any]) -> bytes:
    meta = {"format": "pt"}
    if as_bytes:
        meta[_BYTES_META] = json.dumps(as_bytes, sort_keys=True, separators=(",", ":"))
    text = json.dumps({_META: meta, **header}, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if length > MAX_HEADER:
        raise StateError(
            f"{len(header)} tensors make a header of {length} bytes; safetensors takes {MAX_HEADER}"
        )
    return struct.pack("<Q", length) + text.ljust(length)


def part_tensors(slices: Sequence[Slice], layout: ShardLayout) -> dict[str, Any]:
    """The `tensors` of a rank's part of the manifest; an empty slice leaves only dtype and shape there."""
    tensors: dict[str, Any] = {}
    for item in slices:
        tensors.setdefault(item.key, {"dtype": item.dtype, "shape": list(item.global_shape), "slices": []})
    for placed in layout.placed:
        tensors[placed.slice.key]["slices"].append(
            {
                "offsets": list(placed.slice.offsets),
                "shape": list(placed.slice.shape),
                "start": placed.start,
                "end": placed.end,
            }
        )
    return tensors


def header_size(first: bytes, file_size: int) -> int:
    """Bytes of the whole header, by the file's first 8. Raises Corrupt if that can't be."""
    if len(first) < 8:
        raise Corrupt("a shard file is cut within its first 8 bytes")
    (length,) = struct.unpack("<Q", first[:8])
    if length > MAX_HEADER or 8 + length > file_size:
        raise Corrupt(f"a shard of {file_size} bytes claims a header of {length} bytes")
    return 8 + length


def parse_header(data: bytes, file_size: int) -> dict[str, Stored]:
    """What a shard file of `file_size` bytes holds, by name; `data` is at least its whole header.

    Raises Corrupt on anything that isn't a header this module could have written for such a file.
    """
    end = header_size(data, file_size)
    try:
        raw = json.loads(data[8:end])
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"a shard's header is not JSON: {error}") from error
    if len(data) < end or not isinstance(raw, dict):
        raise Corrupt("a shard's header is cut or not an object")
    real = _real_dtypes(raw.pop(_META, {}))
    stored = {name: _stored(name, entry, real.get(name), end) for name, entry in raw.items()}
    at = end
    for name, entry in sorted(stored.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if entry.start != at:
            raise Corrupt(f"a shard's header has a gap or an overlap before {name!r}")
        at = entry.end
    if at != file_size:
        raise Corrupt(f"a shard's tensors end at byte {at}, but the file has {file_size}")
    return stored


def _real_dtypes(meta: Any) -> dict[str, Any]:
    text = meta.get(_BYTES_META, "{}") if isinstance(meta, dict) else None
    try:
        real = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        real = None
    if not isinstance(real, dict):
        raise Corrupt("a shard's header has unreadable metadata")
    return real


def _stored(name: str, entry: Any, real: Any, data_start: int) -> Stored:
    try:
        kind = CODES[entry["dtype"]]
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        if real is not None:
            kind, shape = DTYPES[real["dtype"]], real["shape"]
        sane = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start, end)) and len(shape) <= 64
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane or end - start != math.prod(shape) * kind.itemsize:
        raise Corrupt(f"a shard's header makes no sense at {name[:200]!r}")
    return Stored(kind.name, tuple(shape), data_start + start, data_start + end)
