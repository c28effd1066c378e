"""Tensors of a checkpoint by name, without a model, an optimizer or a process group."""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt.checkpoint import Checkpoint
from ckpt.errors import NotCommitted
from ckpt.landing import land, torch_dtype, whole_pieces
from ckpt.reader import read_verified
from ckpt.verification import as_checkpoint

__all__ = ["load_tensors"]


def load_tensors(
    checkpoint_or_uri: Checkpoint | str, prefix: str = "model.", *, threads: int = 4
) -> dict[str, Tensor]:
    """The stored tensors whose names begin with `prefix`, by the rest of their names; all bytes are checked.

    They come whole (the slices of all ranks put together), on the CPU, in the dtypes they were saved with;
    `model.load_state_dict(load_tensors(checkpoint))` takes them. Names that were tied when saved share one
    tensor. `prefix=""` gives all tensors, the optimizer's too. Needs no process group. Read are only the 16
    MiB chunks that hold these tensors; memory beside the result: one chunk per thread, and the part of the
    result that was sharded by other than its first dimension.

    Raises NotCommitted if there is no such checkpoint, or no tensor with that prefix; Corrupt if what is
    read is damaged; NewerFormat; StorageError.
    """
    checkpoint = as_checkpoint(checkpoint_or_uri)
    manifest = checkpoint.manifest
    stored_as = {key: key for key in manifest.tensors} | manifest.aliases
    wanted = {key: stored for key, stored in stored_as.items() if key.startswith(prefix)}
    if not wanted:
        heads = sorted({key.split(".")[0] + "." for key in stored_as})
        raise NotCommitted(
            f"{checkpoint.uri} has no tensor named {prefix}...; "
            f"its names begin with {', '.join(heads) or '(none)'}"
        )
    tensors = {
        stored: torch.empty(manifest.tensors[stored].shape, dtype=torch_dtype(manifest.tensors[stored].dtype))
        for stored in dict.fromkeys(wanted.values())
    }
    pieces = [
        piece
        for stored, tensor in tensors.items()
        for piece in whole_pieces(manifest, manifest.tensors[stored], tensor, live=False)
    ]
    wants, copies = land(pieces)
    files = {entry.name: entry for entry in manifest.files}
    read_verified(checkpoint.store, manifest.attempt, files, wants, threads=threads)
    for copy in copies:
        copy.into.copy_(copy.data)
    return {key.removeprefix(prefix): tensors[stored] for key, stored in wanted.items()}
