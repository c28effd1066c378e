"""Which slice of which tensor this rank writes: DCP's public planner decides, this module listens.

Without a process group nothing has to be agreed on, and every tensor is one slice of this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckpt.errors import StateError
from ckpt.layout import Slice
from ckpt.tensor_kinds import dtype_name, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Piece:
    """A slice that this rank writes, and the live memory that holds it: a view of the slice's shape."""

    slice: Slice
    source: Tensor


def plan_pieces(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> list[Piece]:
    """The pieces that this rank writes of a flat state.

    With a group this is a collective over it: all ranks call it at the same point of their save
    sequence, with no other collective on `group` under way. Replicated tensors are written once,
    spread over the ranks that hold them. Raises StateError if the ranks' states don't fit together.
    """
    if group is not None:
        return _plan_together(tensors, group)
    for key, tensor in tensors.items():
        if is_dtensor(tensor):
            raise StateError(
                f"{key} is spread over ranks (DTensor), but the manager was made without a process group: "
                "give process_group=torch.distributed.group.WORLD"
            )
    return [Piece(_whole(key, tensor), tensor.detach()) for key, tensor in tensors.items()]


def _whole(key: str, tensor: Tensor) -> Slice:
    shape = tuple(tensor.shape)
    return Slice(key, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape)


def _plan_together(tensors: Mapping[str, Tensor], group: ProcessGroup) -> list[Piece]:
    # DCP takes long to import and is needed by many ranks only.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from ckpt.dcp_listener import PlanListener

    listener = PlanListener()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plain: dict[str, Any] = dict(tensors)
    try:
        dcp.save(plain, storage_writer=listener, planner=planner, process_group=group)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise StateError(f"the ranks could not agree on who writes what: {causes}") from error
    pieces = []
    for item, source in listener.items:
        data = item.tensor_data
        key = item.index.fqn
        shape = tuple(data.chunk.sizes)
        piece = Slice(
            key, dtype_name(data.properties.dtype), tuple(data.size), tuple(data.chunk.offsets), shape
        )
        pieces.append(Piece(piece, source.view(shape) if source.shape != shape else source))
    return pieces


def refresh(piece: Piece, tensor: Tensor) -> Tensor:
    """The memory of a planned piece in the tensor that took its predecessor's place; same shape and
    placement.
    """
    source = local_part(tensor)
    return source.view(piece.slice.shape) if source.shape != piece.slice.shape else source


def still_fits(piece: Piece, tensor: Tensor) -> bool:
    """Whether a tensor still is what a piece of it was planned for."""
    planned = piece.slice
    return (
        tuple(tensor.shape) == planned.global_shape
        and dtype_name(tensor.dtype) == planned.dtype
        and local_part(tensor).numel() == piece.source.numel()
    )
