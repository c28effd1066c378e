"""How a launch ended, told from what its ranks said and, where they could not speak, from its exit code."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from training.spec import FAILED, FENCED, PREEMPTED, REFUSED, Outcome

TAIL_LINES = 30
TAIL_BYTES = 1 << 16


def exit_text(code: int | None) -> str:
    """An exit code in words: ``exit code 1``, ``killed by SIGKILL``."""
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def last_lines(path: Path, count: int = TAIL_LINES) -> list[str]:
    """The last ``count`` lines of a log file; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


class Story:
    """What the ranks of one launch have said so far; an elastic restart begins a new chapter."""

    def __init__(self) -> None:
        self.chapter = -1
        self.spoke = False
        self.late = ""
        self.step: int | None = None
        self.error: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.logs: dict[int, Path] = {}

    def hear(self, line: dict[str, Any]) -> None:
        """Take in one message of a rank."""
        if "hello" in line:
            self.spoke = True
            if line["restart"] > self.chapter:
                self.chapter, self.error, self.end = line["restart"], None, None
        if "log" in line:
            self.logs[int(line["rank"])] = Path(line["log"])
        event = line.get("event")
        if event in ("step", "restored") and line.get("step") is not None:
            self.step = int(line["step"])
        elif event == "error" and self.error is None:
            self.error = line
        elif event == "end":
            self.end = line

    def overdue(self, grace_s: float) -> None:
        """Note that the launch did not stop in time."""
        self.late = f"did not stop within {grace_s:g} s and was killed"

    def outcome(self, private: Path, code: int, stop: tuple[str, str] | None, killed: bool) -> Outcome:
        """The verdict. What a rank recorded at its end counts; an exit code only where none could speak."""
        if self.end is not None and not self.late:
            state = self.end["outcome"]
            cause = self.end.get("cause")
            tail = self._tail(private) if state == FAILED else {}
            return Outcome(state, self.end.get("step"), cause, code if state == FAILED else 0, tail)
        step = self.step
        if self.error is not None:
            state = {"RunBusy": REFUSED, "Fenced": FENCED}.get(self.error["type"], FAILED)
            cause = f"{self.error['type']}: {self.error['message']}"
            step = self.error.get("step", step)
        elif self.late:
            state, cause = FAILED, self.late
        elif killed:
            state, cause = FAILED, "killed on request"
        elif stop and stop[1] == PREEMPTED and not self.spoke:
            return Outcome(PREEMPTED, None, f"{stop[0]} (before training began)", code)
        else:
            state, cause = FAILED, self._guess(private, code)
        return Outcome(state, step, cause, code, self._tail(private))

    def _tail(self, private: Path) -> dict[int, list[str]]:
        found = {rank: last_lines(path) for rank, path in sorted(self.logs.items())}
        found = {rank: lines for rank, lines in found.items() if lines}
        return found or {-1: last_lines(private / "agent.log")}

    @staticmethod
    def _guess(private: Path, code: int) -> str:
        """The first cause when no rank could name it: a rank that was killed, or torchrun's own failure."""
        log = "\n".join(last_lines(private / "agent.log", 1000))
        first = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)
        if first:
            return f"rank {first[2]}: {exit_text(int(first[1]))}"
        return f"torchrun: {exit_text(code)}"
