"""Copies of large tensors as plain bytes, by the thread that asks for them.

Torch shares a large copy out to as many threads as training has. Where training keeps every core busy, those
get into its way and each other's; NumPy's copy stays in one thread, and without the interpreter lock.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ckpt.errors import StateError

LARGE = 1 << 20


def copies_as_bytes(target: Tensor, source: Tensor) -> bool:
    """Whether the bytes of `source`, at least 1 MiB, are what has to stand in `target`, both on the CPU."""
    return (
        source.nbytes >= LARGE
        and source.dtype == target.dtype
        and source.shape == target.shape
        and all(_plain(tensor) for tensor in (target, source))
    )


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, uint8[nbytes]; it stays there while the array is in use.

    Raises StateError if the tensor's storage was freed or made too small.
    """
    there = tensor.untyped_storage().nbytes()
    needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if there < needed:
        raise StateError(
            f"a tensor needs {needed} bytes of its storage, which has {there} now: it was freed or resized"
        )
    return np.asarray(_Memory(tensor))


def lazy_bits(tensor: Tensor) -> bool:
    """Whether the values are others than the memory holds: lazily conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


class _Memory:
    """A tensor's bytes for NumPy.

    `Tensor.numpy()` would forbid `resize_` on the storage for ever, which is not ours.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy_bits(tensor)
