"""Runs each measurement in a fresh process and collects what it tells."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.memory import MARK, end_marked, marked, pss
from bench.places import temporary
from bench.spec import ENVIRONMENT_OF, Spec

_SAMPLE_S = 0.1
_LEAVE_S = 15.0
_SOURCE = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    """What one process found out, or why it did not.

    status: "ok", "absent" or "failed", with a `reason`. memory: the highest PSS in bytes during each save.
    """

    status: str = "failed"
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)


def measure(job: str, spec: Spec, progress: Callable[[str], None]) -> Outcome:
    """Run `python -m bench.child JOB` on a folder or prefix of its own, which is gone afterwards.

    `progress` gets a line per phase. Whatever ends this, no process that the job started is left.
    """
    mark = uuid.uuid4().hex
    with temporary(spec, job) as given:
        told, tells = os.pipe()
        with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as errors:
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "bench.child",
                        job,
                        given.to_json(),
                        str(tells),
                    ],
                    pass_fds=[tells],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env=_environment(mark) | ENVIRONMENT_OF.get(job, {}),
                )
                os.close(tells)
                outcome = _listen(told, mark, progress)
                code = process.wait()
                _wait_for_the_rest(mark)
            finally:
                end_marked(mark)
                _wait_for_the_rest(mark)
                os.close(told)
            if outcome.status == "failed":
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:] or ["it left no message"]
                outcome.reason = outcome.reason or f"it ended with code {code}: {last[0]}"
    return outcome


def _listen(told: int, mark: str, progress: Callable[[str], None]) -> Outcome:
    outcome = Outcome()
    saving: int | None = None
    for message in _messages(told):
        if saving is not None:
            outcome.memory[saving] = max(outcome.memory[saving], pss(marked(mark)))
        if message is None:
            continue
        if "phase" in message:
            saving = message.get("save")
            if saving is not None:
                outcome.memory.append(0)
            if not saving:
                progress(message["phase"])
        elif "figures" in message:
            outcome.status, outcome.figures = "ok", message["figures"]
        elif "absent" in message:
            outcome.status, outcome.reason = "absent", message["absent"]
        else:
            outcome.reason = message["failed"]
    return outcome


def _messages(told: int) -> Iterator[dict[str, Any] | None]:
    """The messages until the process ends; None whenever it was silent for a moment."""
    rest = b""
    while True:
        if not select.select([told], [], [], _SAMPLE_S)[0]:
            yield None
            continue
        data = os.read(told, 1 << 20)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def _wait_for_the_rest(mark: str) -> None:
    deadline = time.monotonic() + _LEAVE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_SAMPLE_S)


def _environment(mark: str) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # as this project's launcher trains
        **os.environ,
        MARK: mark,
        "PYTHONPATH": f"{_SOURCE}{os.pathsep}{path}" if path else str(_SOURCE),
        "MASTER_ADDR": "127.0.0.1",
    }


@contextmanager
def storage(folder: Path) -> Iterator[None]:
    """`folder` is there meanwhile; what was made for that goes again unless something is left in it."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in made:
            if any(place.iterdir()):
                break
            place.rmdir()
