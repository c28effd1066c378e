"""Dtypes by torch's names (`float32`, `bfloat16`), and how safetensors holds each. Knows no torch."""

from typing import NamedTuple

from ckpt.errors import StateError


class DType(NamedTuple):
    """How one dtype is stored: safetensors' code, bytes per element, whether it lies in the file as U8."""

    name: str
    code: str
    itemsize: int
    as_bytes: bool


_NATIVE = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
# safetensors either can't write these or can't open them again.
_AS_BYTES = {"complex128": 16, "complex32": 4, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1}

DTYPES: dict[str, DType] = {
    **{name: DType(name, code, size, False) for name, (code, size) in _NATIVE.items()},
    **{name: DType(name, "U8", size, True) for name, size in _AS_BYTES.items()},
}
CODES: dict[str, DType] = {kind.code: kind for kind in DTYPES.values() if not kind.as_bytes}
"""The natively stored dtypes by safetensors' code."""


def dtype(name: str, where: str = "") -> DType:
    """The entry for a torch dtype's name, without `torch.`.

    Raises StateError, naming `where` it was met, for what can't be stored: quantized types, sub-byte
    integers, bits.
    """
    found = DTYPES.get(name)
    if found is None:
        place = f"{where}: " if where else ""
        raise StateError(
            f"{place}dtype {name} can't be stored (quantized, sub-byte and bits types have no "
            f"portable form): convert it to a plain dtype such as uint8, or leave it out of the state"
        )
    return found
