"""Copies a state into its arena: what may change at any time at the call, the rest in the background.

A `Stage` ties one plan to one arena. On CPU the background copy is a few `_foreach_copy_` calls,
each of which advances the watermark. On CUDA the arena is pinned, the copies run on a side stream
that waits for the compute stream's state at the call, and training's stream waits for them before
the optimizer moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ckpt import faults
from ckpt.arena import Arena
from ckpt.byte_copies import bytes_of, copies_as_bytes
from ckpt.dcp import Piece, refresh, still_fits
from ckpt.flatten import Flat
from ckpt.guard import Guard, Taken
from ckpt.layout import Placed, ShardLayout
from ckpt.tensor_kinds import same_memory
from ckpt.whereabouts import Whereabouts

_BATCH = 32 << 20


class Stage:
    """One plan over one arena. `copy_at_call` belongs to the training thread, `copy_rest` to the
    background.
    """

    def __init__(self, flat: Flat, pieces: Sequence[Piece], layout: ShardLayout, arena: Arena) -> None:
        """`arena` has to hold `layout.size` bytes and stays the caller's; nothing is copied yet."""
        self.layout = layout
        self.announced = False
        by_slice = {id(piece.slice): piece for piece in pieces}
        self._kinds = {key: entry.kind for key, entry in flat.tensors.items()}
        self._tensors = {key: entry.tensor for key, entry in flat.tensors.items()}
        self._aliases, self._aliasing = flat.aliases, flat.aliasing
        self._pieces: list[Piece] = []
        self._targets: list[Tensor] = []
        self._at_call: list[int] = []
        self._batches: list[tuple[list[int], int]] = []
        for placed in layout.placed:
            piece = by_slice[id(placed.slice)]
            self._pieces.append(piece)
            self._targets.append(_target(arena, placed, piece.source.dtype))
        self._sources = [piece.source for piece in self._pieces]
        self._split(layout)
        self._rest = [i for batch, _ in self._batches for i in batch]
        self._look()
        self._cuda = _CudaCopies(self._sources) if any(s.is_cuda for s in self._sources) else None

    def _split(self, layout: ShardLayout) -> None:
        batch: list[int] = []
        start = len(layout.header)
        for i, placed in enumerate(layout.placed):
            (batch if self._kinds[placed.slice.key] == "step" else self._at_call).append(i)
            if placed.end - start >= _BATCH:
                self._batches.append((batch, placed.end))
                batch, start = [], placed.end
        self._batches.append((batch, layout.size))

    def copy_at_call(self, tensors: Mapping[str, Tensor]) -> Taken:
        """Copy what may change at any time, and look at the rest; returns what the guard saw.

        `tensors` are the "call" tensors as collected now, with the planned shapes and dtypes.
        """
        sources = [refresh(self._pieces[i], tensors[self._pieces[i].slice.key]) for i in self._at_call]
        with torch.no_grad():
            _copy([self._targets[i] for i in self._at_call], sources)
            taken = self._guard.take()
        if self._cuda is not None:
            self._cuda.mark()
        return taken

    def copy_rest(self, taken: Taken, progress: Callable[[int], None], queued: Callable[[], None]) -> None:
        """Copy everything else, calling `progress(bytes staged from the start)` as it grows.

        `taken` is what `copy_at_call` returned. `queued` is called once training's optimizer may move,
        provided that it goes through `join_device` first. Raises StateError for memory that was freed.
        """
        self._guard.note(taken)
        faults.point("stage", "begin")
        if self._cuda is not None:
            self._cuda.copy(self._batches, self._sources, self._targets, progress, queued)
        else:
            with torch.no_grad():
                for batch, end in self._batches:
                    small = [i for i in batch if i not in self._bytes]
                    _copy([self._targets[i] for i in small], [self._sources[i] for i in small])
                    for i in batch:
                        if i in self._bytes:
                            np.copyto(bytes_of(self._targets[i]), bytes_of(self._sources[i]))
                    progress(end)
            queued()
        faults.point("stage", "end")

    def join_device(self) -> None:
        """Make the current CUDA stream wait for the copies that `copy_rest` has queued."""
        if self._cuda is not None:
            self._cuda.join()

    def seems_moved(self) -> bool:
        """Whether tensors lie in other memory than planned, as far as the training thread can see at once."""
        return self._where.seems_moved()

    def moved(self) -> str | None:
        """The key of a tensor that lies in other memory than planned (`.data =`, `module.to`) or has another
        shape, or None.
        """
        return self._where.moved()

    def live_complaint(self, taken: Taken) -> str | None:
        """Why the live state is not that of the call any more, or None. To be asked before the
        optimizer moves.
        """
        if key := self.moved():
            return f"{key} moved to other memory while it was copied"
        if key := self._guard.written_to(taken):
            return f"{key} was written to while it was copied"
        return None

    def copy_complaint(self, taken: Taken) -> str | None:
        """Why the arena does not hold the state of the call, or None. To be asked when all is copied."""
        key = self._guard.differs(taken)
        return f"{key} changed while it was copied" if key else None

    def refresh(self) -> bool:
        """Look the memory of moved tensors up again; False if a shape, a dtype or an alias has changed as
        well.
        """
        if any(same_memory(t) != same_memory(self._owner(key)) for key, t in self._aliasing.items()):
            return False
        for i in self._rest:
            piece = self._pieces[i]
            tensor = self._tensors[piece.slice.key]
            if not still_fits(piece, tensor):
                return False
            self._sources[i] = refresh(piece, tensor)
        self._look()
        return True

    def _owner(self, alias: str) -> Tensor:
        return self._tensors[self._aliases[alias]]

    def _look(self) -> None:
        """Take the live memory as it is now for what is to be copied."""
        keys = [self._pieces[i].slice.key for i in self._rest]
        self._bytes = {i for i in self._rest if copies_as_bytes(self._targets[i], self._sources[i])}
        self._guard = Guard(
            keys, [self._sources[i] for i in self._rest], [self._targets[i] for i in self._rest]
        )
        self._where = Whereabouts({key: self._tensors[key] for key in keys}, self._aliasing)


def _target(arena: Arena, placed: Placed, dtype: torch.dtype) -> Tensor:
    nbytes = placed.end - placed.start
    flat = torch.frombuffer(arena.buffer, dtype=torch.uint8, count=nbytes, offset=placed.start)
    return flat.view(dtype).view(placed.slice.shape)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if not targets:
        return
    if any(_odd(source) for source in sources):
        for target, source in zip(targets, sources, strict=True):
            if source.dtype in _BYTES_ONLY:
                target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
            else:
                target.copy_(source, non_blocking=source.is_cuda)
        return
    torch._foreach_copy_(targets, sources, non_blocking=any(source.is_cuda for source in sources))


_BYTES_ONLY = {
    dtype
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
}


def _odd(source: Tensor) -> bool:
    return source.is_conj() or source.is_neg() or source.dtype in _BYTES_ONLY


class _CudaCopies:
    """A side stream for each device of a stage, and the events that order it against training's stream."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        devices = {source.device for source in sources if source.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._called = {device: torch.cuda.Event() for device in devices}
        self._done = {device: torch.cuda.Event() for device in devices}

    def mark(self) -> None:
        """Remember what training's streams have queued so far: the state of the call."""
        for device, event in self._called.items():
            event.record(torch.cuda.current_stream(device))

    def copy(
        self,
        batches: Sequence[tuple[list[int], int]],
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        progress: Callable[[int], None],
        queued: Callable[[], None],
    ) -> None:
        """Queue all copies, say so, then follow them to advance the watermark."""
        reached: list[list[torch.cuda.Event]] = [[] for _ in batches]
        with torch.no_grad():
            for device, stream in self._streams.items():
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    stream.wait_event(self._called[device])
                    for (batch, _), events in zip(batches, reached, strict=True):
                        mine = [i for i in batch if sources[i].device == device]
                        _copy([targets[i] for i in mine], [sources[i] for i in mine])
                        event = torch.cuda.Event()
                        event.record(stream)
                        events.append(event)
                    self._done[device].record(stream)
            on_host = [i for batch, _ in batches for i in batch if not sources[i].is_cuda]
            _copy([targets[i] for i in on_host], [sources[i] for i in on_host])
        queued()
        for (_, end), events in zip(batches, reached, strict=True):
            for event in events:
                event.synchronize()
            progress(end)

    def join(self) -> None:
        """Let training's streams wait for the copies on their devices; the host goes on."""
        for device, event in self._done.items():
            torch.cuda.current_stream(device).wait_event(event)


def pin(arena: Arena) -> Callable[[], None]:
    """Page-lock an arena for CUDA where possible; returns what undoes it."""
    address = torch.frombuffer(arena.buffer, dtype=torch.uint8, count=1).data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, arena.size, 0)) != 0:
        return lambda: None
    return lambda: runtime.cudaHostUnregister(address)
