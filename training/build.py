"""Objects from configuration nodes with a ``_target_``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def locate(target: str) -> Any:
    """What a dotted path names. Raises ImportError naming the path and the part that is not there."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            continue
        for name in parts[cut:]:
            try:
                found = getattr(found, name)
            except AttributeError:
                raise ImportError(f"_target_: {target}: {module_name} has no {name!r}") from None
        return found
    raise ImportError(f"_target_: {target}: no module {parts[0]!r} here; give the full dotted path")


def build(node: Mapping[str, Any], *args: Any, **more: Any) -> Any:
    """Call the node's ``_target_`` with ``args``, its other keys and ``more``; nested nodes come first."""
    options = {key: _nested(value) for key, value in node.items() if key != "_target_"}
    return locate(node["_target_"])(*args, **options, **more)


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if "_target_" in value else {key: _nested(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nested(item) for item in value]
    return value
