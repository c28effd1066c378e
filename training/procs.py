"""Which processes belong to a launch, read from /proc; nothing here needs torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    parent: int
    session: int
    state: str


def read(pid: int) -> Process | None:
    """The process with this pid, or None if there is none."""
    try:
        # The command may hold spaces and brackets: everything after the last ')' is plain.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return Process(pid, int(fields[1]), int(fields[3]), fields[0])


def table() -> Iterator[Process]:
    """Every live process. Zombies are left out: they run nothing, and only their parent can end them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := read(int(entry.name))) and found.state not in "ZX":
            yield found


def has_environment(pid: int, entry: str) -> bool:
    """Whether the process was started with ``NAME=value`` in its environment."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def members(agent: int, ranks: Iterable[int], mark: str) -> list[Process]:
    """What still runs of a launch: the agent's session, its children's sessions, those of known ranks.

    ``mark`` (``NAME=value``) is in the environment of all of them, so a reused pid is never taken for ours.
    A helper that left for a session of its own on purpose (a checkpoint writer that is still draining, a
    metrics sender) is no member.
    """
    rows = list(table())
    wanted = {agent, *ranks} | {row.pid for row in rows if row.parent == agent and row.session == row.pid}
    return [row for row in rows if row.session in wanted and has_environment(row.pid, mark)]


def end(agent: int, ranks: Iterable[int], mark: str) -> None:
    """SIGKILL all members; the agent is stopped first so that it can't start a rank meanwhile."""
    if has_environment(agent, mark):
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGSTOP)
    for row in members(agent, ranks, mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(row.pid, signal.SIGKILL)
