"""A plan: what one structure of the state means for this rank's shard, with the arenas it is staged in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt import capacity, faults
from ckpt.arena import Arena
from ckpt.dcp import Piece, plan_pieces
from ckpt.errors import StorageError
from ckpt.flatten import Flat
from ckpt.layout import ShardLayout, part_tensors, plan_shard
from ckpt.staging import Stage, pin
from ckpt.tensor_kinds import is_dtensor
from ckpt.values import encode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(eq=False)
class Plan:
    """Valid as long as what `flat` watches is the same; `number` tells plans apart. `tensors` is the
    part's entry.
    """

    number: int
    flat: Flat
    pieces: list[Piece]
    layout: ShardLayout
    tensors: dict[str, Any]
    static: dict[str, Any]
    stages: dict[int, Stage] = field(default_factory=dict)


def make_plan(number: int, flat: Flat, group: ProcessGroup | None, rank: int) -> Plan:
    """Plan a flattened state; a collective over `group` if there is one. Raises StateError."""
    faults.point("plan", str(number))
    shared, own = {}, {}
    for key, entry in flat.tensors.items():
        # Parameters and what goes with them are equal on the ranks that hold them, whoever writes them.
        # Buffers need not be: rank 0's count, as they do for DistributedDataParallel.
        if entry.kind == "step" or is_dtensor(entry.tensor):
            shared[key] = entry.tensor
        elif entry.per_rank or rank == 0:
            own[key] = entry.tensor
    pieces = plan_pieces(shared, group) + plan_pieces(own, None)
    slices = [piece.slice for piece in pieces]
    layout = plan_shard(slices)
    static = {name: encode(value, name) for name, value in flat.static.items()}
    return Plan(number, flat, pieces, layout, part_tensors(slices, layout), static)


class Arenas:
    """The arenas of all slots, each made when a plan first needs it and made anew when one needs more
    or far less.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._arenas: dict[int, Arena] = {}
        self._unpin: dict[int, Callable[[], None]] = {}
        self._untouched: set[int] = set()

    def fit(self, slot: int, size: int, on_cuda: bool) -> tuple[Arena, bool]:
        """An arena of a free slot for a shard of `size` bytes, and whether it is a new one.

        A new one is backed by memory for CUDA; else `touch` does that, which takes longer than all else.
        Raises StorageError with numbers if memory can't hold it.
        """
        old = self._arenas.get(slot)
        if old is not None and size <= old.size <= 2 * size:
            return old, False
        self.drop(slot)
        warning = capacity.settle(capacity.check_memory(size))
        if warning:
            self._say(warning)
        arena = Arena.create(size)
        self._arenas[slot] = arena
        self._untouched.add(slot)
        if on_cuda:
            self.touch(slot)
            self._unpin[slot] = pin(arena)
        return arena, True

    def touch(self, slot: int) -> None:
        """Back a slot's arena by memory, once. Raises StorageError, every time, if there is not enough."""
        if slot not in self._untouched:
            return
        arena = self._arenas[slot]
        try:
            arena.touch().result()
        except OSError as error:
            raise StorageError(
                f"no memory for staging {arena.size} bytes: {error}; use a smaller state or fewer slots"
            ) from error
        self._untouched.discard(slot)

    def get(self, slot: int) -> Arena | None:
        """The arena of a slot, if it has one."""
        return self._arenas.get(slot)

    def drop(self, slot: int) -> None:
        """Give a slot's memory back."""
        unpin = self._unpin.pop(slot, None)
        if unpin is not None:
            unpin()
        self._untouched.discard(slot)
        arena = self._arenas.pop(slot, None)
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Give all memory back."""
        for slot in list(self._arenas):
            self.drop(slot)
