"""Resharding on load: which boxes of the stored slices this rank's DTensors need, by DCP's planner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ckpt.errors import Corrupt
from ckpt.landing import Piece, torch_dtype
from ckpt.manifest import Manifest, SliceEntry
from ckpt.tensor_kinds import local_part

__all__ = ["dcp_metadata", "sharded_pieces"]


def dcp_metadata(manifest: Manifest, names: Mapping[str, str]) -> Metadata:
    """DCP's description of stored tensors; `names` maps the names wanted in it to the manifest's."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(torch_dtype(manifest.tensors[stored].dtype)),
                torch.Size(manifest.tensors[stored].shape),
                [
                    ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape))
                    for part in manifest.tensors[stored].slices
                ],
            )
            for key, stored in names.items()
        }
    )


def sharded_pieces(
    manifest: Manifest, targets: Mapping[str, Tensor], names: Mapping[str, str], live: frozenset[str]
) -> list[Piece]:
    """What this rank has to read for its parts of `targets`; `names` gives their names in the manifest.

    Takes DTensors on any mesh, and plain tensors. No collective: every rank plans its own reads, which is
    all that DCP's planner does for a load. Raises Corrupt if the stored slices leave a part unfilled.
    """
    solid = {key: target for key, target in targets.items() if target.numel()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(solid), dcp_metadata(manifest, {key: names[key] for key in solid}), False)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    left = {key: local_part(target).numel() for key, target in solid.items()}
    pieces = []
    for item in plan.items:
        key = item.dest_index.fqn
        stored = _stored(manifest, names[key], item)
        into = planner.resolve_tensor(item).detach()
        left[key] -= into.numel()
        pieces.append(
            Piece(
                manifest.files[stored.file].name,
                stored,
                torch_dtype(manifest.tensors[names[key]].dtype),
                tuple(item.storage_offsets),
                tuple(item.lengths),
                into,
                key in live,
            )
        )
    unfilled = sorted(key for key, count in left.items() if count)
    if unfilled:
        raise Corrupt(f"{manifest.attempt}: the stored slices don't fill {', '.join(unfilled[:10])}")
    return pieces


def _stored(manifest: Manifest, name: str, item: ReadItem) -> SliceEntry:
    index: MetadataIndex = item.storage_index
    slices = manifest.tensors[name].slices
    assert index.index is not None and index.offset is not None
    assert tuple(index.offset) == slices[index.index].offsets
    return slices[index.index]
