"""Sees whether live tensors still lie where they were planned to lie, and look as they were planned to.

`tensor.data = other`, `module.to(...)`, `resize_` and the like leave the tensor object and exchange what is
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt.tensor_kinds import is_dtensor

# As many are looked at while training waits; memory is exchanged for a whole model at a time, as a rule.
_GLANCE = 64
_pointer = Tensor.data_ptr


class _Place(NamedTuple):
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Whereabouts:
    """Where tensors lie: `tensors` by key, and `aliases`, which are to lie where another of them does.

    Of a DTensor it is the local tensor that moves: FSDP2 swaps what it holds only by way of that.
    """

    def __init__(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, Tensor]) -> None:
        self._keys = [*tensors, *aliases]
        self._live = [
            getattr(t, "_local_tensor", t) if is_dtensor(t) else t
            for t in (*tensors.values(), *aliases.values())
        ]
        self._then = list(map(_place, self._live))
        step = -(-len(tensors) // _GLANCE) or 1
        self._glanced: Sequence[Tensor] = self._live[: len(tensors) : step]
        self._pointers = list(map(_pointer, self._glanced))

    def seems_moved(self) -> bool:
        """Whether one of a few tensors lies elsewhere; cheap enough for the training thread."""
        return list(map(_pointer, self._glanced)) != self._pointers

    def moved(self) -> str | None:
        """The key of a tensor that lies elsewhere or has another shape, stride or dtype; or None."""
        now = list(map(_place, self._live))
        if now == self._then:
            return None
        return next(k for k, then, place in zip(self._keys, self._then, now, strict=True) if then != place)


def _place(tensor: Tensor) -> _Place:
    return _Place(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
