"""One short text that tells two sets of weights apart, to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The xxh3-128 (hex) of all tensors' bytes in order of their names; names, dtypes, shapes count."""
    total = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
