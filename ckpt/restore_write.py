"""Puts what was read into live tensors, in place and whatever kind of tensors they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ckpt.byte_copies import bytes_of, copies_as_bytes, lazy_bits
from ckpt.landing import Copy

__all__ = ["write", "write_all"]

_COPIERS = 8


def write(into: Tensor, data: Tensor) -> None:
    """Copy `data` into a tensor outside of autograd, which learns of it by the version counter.

    Inference tensors, and lazily conjugated or negated views, are written to as well.
    """
    with torch.inference_mode() if into.is_inference() else torch.no_grad():
        into.detach().copy_(data)


def write_all(copies: Sequence[Copy]) -> None:
    """Make many copies, as `write` does, by every core that this process may use."""
    odd: list[Copy] = []
    large: list[Copy] = []
    few: list[Copy] = []
    for copy in copies:
        into = copy.into
        if into.is_inference() or lazy_bits(into):
            odd.append(copy)
        else:
            (large if copies_as_bytes(into, copy.data) else few).append(copy)
    for copy in odd:
        write(copy.into, copy.data)
    if few:
        with torch.no_grad():
            torch._foreach_copy_([copy.into for copy in few], [copy.data for copy in few])
    if large:
        # Nothing trains yet: every core may help. Autograd learns of it as of any other write in place.
        with ThreadPoolExecutor(min(_COPIERS, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(lambda copy: np.copyto(bytes_of(copy.into), bytes_of(copy.data)), large))
        increment_version([copy.into for copy in large])
