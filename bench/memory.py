"""Memory of everything that an engine runs, shared pages counted once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Inherited by all that a measured process starts, also by what leaves its process group and outlives it.
MARK = "CKPT_BENCH_MARK"
# By then every engine has made all the buffers it will ever want.
_SETTLED = 3
_SLACK = 0.03


def marked(mark: str) -> list[int]:
    """The ids of the processes started with `mark` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def pss(pids: list[int]) -> int:
    """Bytes of memory of these processes, a page that several of them share counted as one.

    Pages of files (libraries above all) are left out: their share depends on who else on the machine has them
    mapped just then.
    """
    return sum(_pss(pid) for pid in pids)


def flat(memory: Sequence[int], state_bytes: int) -> bool | None:
    """Whether memory (bytes during each save) stays at the third save's, but for 3 % of the state; None for
    fewer than four saves.
    """
    if len(memory) <= _SETTLED:
        return None
    return max(memory[_SETTLED:]) - memory[_SETTLED - 1] <= _SLACK * state_bytes


def end_marked(mark: str) -> None:
    """Kill what is left of the processes started with `mark`."""
    for pid in marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _pss(pid: int) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(
            int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        )
    return 0  # it has ended meanwhile
