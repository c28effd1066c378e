"""Everything in a state that is not a tensor, as JSON and back: no pickle, and nothing to run on loading.

JSON takes None, booleans, strings, finite floats and 64-bit integers as they are, lists as lists, and a dict
whose keys are strings in sorted order as an object. Whatever else there is becomes an object with one
`$`-tagged key. What comes back equals what went in, dict order and types included, except that NumPy scalars
come back as Python's, an Enum as its value, and mappings, dataclasses and config objects as dicts.
"""

import base64
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from ckpt.errors import Corrupt, StateError

MAX_DEPTH = 100
_AS_THEY_ARE = frozenset({type(None), bool, str})
_INT64 = 1 << 63
_NUMPY_DTYPE = re.compile(r"[<>|=](?:[biufcS]\d{1,9}|U\d{1,9}|[mM]8(?:\[\d*[a-zA-Z]{1,2}\])?)")


@dataclass(frozen=True)
class TensorRef:
    """Stands in a tree of values for a tensor that is stored under `key`."""

    key: str


def encode(value: Any, where: str = "", *, ordered: bool = True) -> Any:
    """`value` as a JSON tree. `where` is its name, such as `optim.param_groups[0].lr`, for error texts.

    With `ordered=False` dicts with string keys are always plain objects: easier to read for other tools, but
    the order of keys is lost. Raises StateError with the full name of what can't be made plain.
    """
    return _encode(value, where or "value", 0, ordered)


class _Key(NamedTuple):
    key: Any

    def __repr__(self) -> str:
        return f"the key {self.key!r}"


_MEMBER = object()
_WHOLE = object()

# Where a value stands: the root's name, or the place of what holds it, the key or index there (`_MEMBER` of a
# set, `_WHOLE` for the holder itself in another form), and the holder. Put into words only when something is
# refused, since values are encoded in the training thread.
Where = str | tuple["Where", Any, Any]


def _say(where: Where) -> str:
    steps: list[Any] = []
    while not isinstance(where, str):
        where, step, _ = where
        steps.append(step)
    for step in reversed(steps):
        if step is _MEMBER:
            where += ".<member>"
        elif step is not _WHOLE:
            where += f".{step}" if isinstance(step, str) else f"[{step!r}]"
    return where if len(where) <= 300 else f"{where[:150]} ... {where[-100:]}"


def _encode(value: Any, where: Where, depth: int, ordered: bool) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > MAX_DEPTH:
        raise StateError(f"{_say(where)}: nested deeper than {MAX_DEPTH} levels, or holds itself")
    if kind is list or kind is tuple:
        items = [
            item if type(item) in _AS_THEY_ARE else _encode(item, (where, i, value), depth + 1, ordered)
            for i, item in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, depth, ordered)
    if isinstance(value, TensorRef):
        return {"$tensor": value.key}
    return _encode_rarer(value, where, depth, ordered)


def _encode_mapping(value: Mapping[Any, Any], where: Where, depth: int, ordered: bool) -> Any:
    try:
        pairs = list(value.items())
    except Exception as error:
        raise StateError(f"{_say(where)}: its items can't be read ({error})") from error
    keys = [
        key if type(key) is str else _encode(key, (where, _Key(key), value), depth + 1, ordered)
        for key, _ in pairs
    ]
    items = [
        item if type(item) in _AS_THEY_ARE else _encode(item, (where, key, value), depth + 1, ordered)
        for key, item in pairs
    ]
    strings = all(type(key) is str for key in keys)
    if len(set(keys) if strings else {repr(key) for key in keys}) != len(keys):
        raise StateError(f"{_say(where)}: two of its keys are the same once made plain")
    if strings and not any(key.startswith("$") for key in keys) and (not ordered or keys == sorted(keys)):
        return dict(zip(keys, items, strict=True))
    return {"$dict": [[key, item] for key, item in zip(keys, items, strict=True)]}


def _encode_rarer(value: Any, where: Where, depth: int, ordered: bool) -> Any:
    if isinstance(value, enum.Enum):
        return _encode(value.value, where, depth + 1, ordered)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return _encode_numpy(value, where, depth, ordered)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return _encode(base(value), where, depth + 1, ordered)
    if isinstance(value, complex):
        return {
            "$complex": [
                _encode(value.real, where, depth, ordered),
                _encode(value.imag, where, depth, ordered),
            ]
        }
    if isinstance(value, set | frozenset):
        items = [_encode(item, (where, _MEMBER, value), depth + 1, ordered) for item in value]
        return {"$set" if isinstance(value, set) else "$frozenset": sorted(items, key=repr)}
    if isinstance(value, pathlib.PurePath):
        return {"$path": str(value)}
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return {f"${type(value).__name__}": value.isoformat()}
    if isinstance(value, dt.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _encode(fields, (where, _WHOLE, value), depth + 1, ordered)
    if isinstance(value, SimpleNamespace) or type(value).__name__ == "Namespace":
        return _encode(vars(value), (where, _WHOLE, value), depth + 1, ordered)
    if isinstance(value, range):
        return {"$range": [value.start, value.stop, value.step]}
    if isinstance(value, tuple):
        return _encode(tuple(value), (where, _WHOLE, value), depth + 1, ordered)
    if isinstance(value, Sequence):
        return _encode(list(value), (where, _WHOLE, value), depth + 1, ordered)
    raise StateError(f"{_say(where)}: {_refusal(value, where)}")


def _refusal(value: Any, where: Where) -> str:
    torch = sys.modules.get("torch")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if torch is not None and isinstance(value, torch.Tensor):
        return _misplaced_tensor(where)
    if torch is not None and isinstance(value, torch.Generator):
        return f"a {kind} can't be stored as plain data; give generator.get_state(), a tensor"
    return (
        f"a {kind} can't be stored as plain data; give numbers, strings, bytes, lists, tuples, dicts, sets, "
        f"NumPy arrays or tensors, or leave it out of the state"
    )


def _misplaced_tensor(where: Where) -> str:
    """Tensors in plain containers have been taken out before: what kind of container kept this one."""
    holder, instead = None, ""
    while not isinstance(where, str):
        outer, step, held = where
        if isinstance(step, _Key):
            holder, instead = "as a dict's key", "make it a value"
        elif type(held) not in (list, tuple):
            mapping = isinstance(held, Mapping)
            if not mapping or type(held).__module__ not in ("builtins", "collections"):
                plain = "tuple" if isinstance(held, tuple) else "list"
                plain = plain if isinstance(held, set | frozenset | Sequence) else "dict"
                holder = f"inside the {type(held).__qualname__} {_say(outer)}"
                instead = f"make it a plain {plain}"
        where = outer
    return (
        f"a tensor can't be stored {holder or 'here'}: tensors may lie in dicts, lists and plain tuples"
        f"{f'; {instead}' if instead else ''}, or leave it out of the state"
    )


def _encode_numpy(value: Any, where: Where, depth: int, ordered: bool) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise StateError(
                f"{_say(where)}: a NumPy array of {value.dtype} can't be stored; use a plain dtype"
            )
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    item = value.item()
    if isinstance(item, np.generic) or (
        isinstance(value, np.datetime64 | np.timedelta64) and isinstance(item, int)
    ):
        raise StateError(
            f"{_say(where)}: a NumPy {type(value).__name__} has no exact form in Python; convert it first"
        )
    return _encode(item, where, depth + 1, ordered)


def decode(tree: Any) -> Any:
    """The value that `encode` made this tree of. Raises Corrupt for a tree that `encode` never makes."""
    try:
        return _decode(tree, 0)
    except (ValueError, TypeError, OverflowError, KeyError, IndexError) as error:
        raise Corrupt(f"stored values don't make sense: {error}") from error


def _decode(tree: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise Corrupt(f"stored values are nested deeper than {2 * MAX_DEPTH} levels")
    if isinstance(tree, list):
        return [_decode(item, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (tag, body) = next(iter(tree.items()))
        if tag.startswith("$"):
            decoder = _DECODERS.get(tag)
            if decoder is None:
                raise Corrupt(f"stored values hold the unknown kind {tag!r}")
            return decoder(body, depth + 1)
    return {key: _decode(item, depth + 1) for key, item in tree.items()}


def _decode_array(body: Any, _: int) -> Any:
    import numpy as np

    dtype, shape, data = body
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise Corrupt(f"stored values hold an array of the unknown dtype {dtype!r}")
    # A copy, because an array over bytes is read-only and what was saved was not.
    return np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape).copy()


def _decode_pairs(body: Any, depth: int) -> dict[Any, Any]:
    return {_decode(key, depth): _decode(item, depth) for key, item in body}


def _decode_complex(body: Any, depth: int) -> complex:
    return complex(_decode(body[0], depth), _decode(body[1], depth))


def _text(body: Any) -> str:
    if not isinstance(body, str):
        raise Corrupt("stored values name a tensor by something that is no text")
    return body


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$int": lambda body, _: int(body, 16),
    "$float": lambda body, _: float(body),
    "$tuple": lambda body, depth: tuple(_decode(item, depth) for item in body),
    "$dict": _decode_pairs,
    "$bytes": lambda body, _: base64.b64decode(body, validate=True),
    "$complex": _decode_complex,
    "$set": lambda body, depth: {_decode(item, depth) for item in body},
    "$frozenset": lambda body, depth: frozenset(_decode(item, depth) for item in body),
    "$path": lambda body, _: pathlib.Path(body),
    "$datetime": lambda body, _: dt.datetime.fromisoformat(body),
    "$date": lambda body, _: dt.date.fromisoformat(body),
    "$time": lambda body, _: dt.time.fromisoformat(body),
    "$timedelta": lambda body, _: dt.timedelta(*body),
    "$range": lambda body, _: range(*body),
    "$array": _decode_array,
    "$tensor": lambda body, _: TensorRef(_text(body)),
}
