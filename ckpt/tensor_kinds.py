"""Which tensors can be stored, and when two tensors are the same memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ckpt.dtypes import DTYPES
from ckpt.errors import StateError


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in files: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; never imports torch.distributed.tensor, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached, same memory: a DTensor's local shard, or the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part.detach()


def refuse_unstorable(key: str, tensor: Tensor) -> None:
    """Raise StateError, naming the tensor and the reason, for what a shard can't hold."""
    reason = _unstorable(tensor)
    if reason:
        raise StateError(f"{key} can't be stored: {reason}")


def same_memory(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same elements of the same memory."""
    spread = is_dtensor(tensor)
    part = local_part(tensor) if spread else tensor
    if not part.numel() or part.device.type == "meta":
        return (id(tensor),)
    spec = (str(getattr(tensor, "placements", ())), tuple(tensor.shape)) if spread else ()
    lazy = (part.is_conj(), part.is_neg()) if part.dtype.is_complex or part.is_neg() else ()
    return (part.device, part.data_ptr(), part.shape, part.stride(), part.dtype, lazy, spec)


def _unstorable(tensor: Tensor) -> str | None:
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.dtype in _STORABLE:
        return "it is on the meta device and has no values" if tensor.is_meta else None
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_lazy(tensor):
        return "it is a lazy parameter that has no shape yet: run one forward pass before the first save"
    if tensor.is_quantized:
        return "it is a quantized tensor: store its integers, scale and zero point as tensors instead"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its layout is {tensor.layout}: store its indices and values as dense tensors instead"
    if is_dtensor(tensor):
        return _unstorable(local_part(tensor))
    if is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__}, which wraps other tensors: store those instead"
    if tensor.dtype not in _STORABLE:
        return f"files have no dtype {tensor.dtype}: convert it to a plain one, such as uint8"
    return "it is on the meta device and has no values" if tensor.is_meta else None


_PLAIN = (Tensor, torch.nn.Parameter)
_STORABLE = {dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
