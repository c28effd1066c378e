"""Copies of large tensors as plain bytes, by the thread that asks for them.

Torch shares a large copy out to as many threads as training has. Where training keeps every core busy, those
get into its way and each other's; NumPy's copy stays in one thread, and without the interpreter lock.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
    """The memory of a contiguous CPU tensor, uint8[nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _plain(tensor: Tensor) -> bool:
    bits = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not bits
