"""How a state and a checkpoint differ, gathered in one list and shown whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Difference", "report"]

_ORDER = ("missing", "unexpected", "shape", "dtype", "other")
_TITLES = {
    "missing": "missing (this state has it, the checkpoint doesn't)",
    "unexpected": "unexpected (the checkpoint has it, this state doesn't)",
    "shape": "another shape",
    "dtype": "another dtype",
    "other": "other",
}


class Difference(NamedTuple):
    """One place where they differ; `kind` is missing, unexpected, shape, dtype or other."""

    kind: str
    name: str
    detail: str = ""


def report(differences: Iterable[Difference]) -> str:
    """All differences, one a line, grouped by kind."""
    found = sorted(set(differences), key=lambda d: (_ORDER.index(d.kind), d.name, d.detail))
    lines: list[str] = []
    for kind in _ORDER:
        of_kind = [d for d in found if d.kind == kind]
        if of_kind:
            lines.append(f"  {_TITLES[kind]}:")
            lines += [f"    {d.name}: {d.detail}" if d.detail else f"    {d.name}" for d in of_kind]
    return "\n".join(lines)
