"""The exact commands that a person may type next, quoted for the shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from flows import storage
from flows.overrides import split, unquote
from flows.project import shown

# Overrides that say where a run is; the next command needs them too.
_WHERE = ("storage", "tracking", "local")


def where(overrides: Sequence[str]) -> list[str]:
    """Those overrides that the next command has to repeat in order to find the run."""
    found = []
    for text in overrides:
        one = split(text)
        if one.key.partition(".")[0] in _WHERE and one.value is not None:
            bare = f"{one.mode}{one.key}={unquote(one.value)}"
            found.append(bare)
    return found


def flow(name: str, run: str, overrides: Sequence[str] = (), *more: str) -> str:
    """`python -m flows.resume run=brave-otter ...`"""
    return shlex.join(["python", "-m", f"flows.{name}", f"run={run}", *more, *where(overrides)])


def ckpt(verb: str, uri: str) -> str:
    """`python -m ckpt ls runs/brave-otter`, with the variables before it that lead to its object store."""
    command = shlex.join(["python", "-m", "ckpt", verb, shown(uri)])
    leading = [] if storage.is_folder(uri) else storage.assignments()
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in leading), command])
