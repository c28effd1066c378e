"""Sends metrics to MLflow: ``python -m training.metrics_sender FOLDER``, lines on standard input.

Everything is written to the folder's spool first. Sending begins when ``FOLDER/tracking.json`` names the
server and the run ({"uri", "run_id"}), and MLflow is imported only then. What cannot be sent stays for the
next sender of that folder. It runs out of its trainer's process tree and ends by itself after end of file.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.spool import Line, Spool

BATCH = 500  # MLflow takes up to 1000 metrics in a request
POLL_S = 0.5
BACKOFF_S = (1.0, 30.0)
DRAIN_S = 30.0  # how long to go on trying after end of file
BOUNDS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

Send = Callable[[Sequence[Line]], None]


def mlflow_send(tracking: dict[str, Any]) -> Send:
    """A function that sends lines to the run in one bounded request."""
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=tracking["uri"])

    def send(lines: Sequence[Line]) -> None:
        metrics = [Metric(line.key, line.value, line.at, line.step) for line in lines]
        client.log_batch(tracking["run_id"], metrics=metrics, synchronous=True)

    return send


def read_lines(spool_folder: Path, ended: threading.Event) -> None:
    """Take lines from standard input into the spool until end of file."""
    spool = Spool(spool_folder)
    try:
        pending = b""
        while data := os.read(0, 1 << 16):
            *whole, pending = (pending + data).split(b"\n")
            spool.add(line for text in whole if text for line in parse(text))
    finally:
        spool.close()
        ended.set()


def parse(text: bytes) -> list[Line]:
    """The metrics of one line."""
    line = json.loads(text)
    return [
        Line(key, int(line["step"]), float(value), int(line["at"])) for key, value in line["values"].items()
    ]


def deliver(
    folder: Path, ended: threading.Event, drain_s: float = DRAIN_S, connect: Any = mlflow_send
) -> None:
    """Send what the spool holds until all is sent after the end, or ``drain_s`` after it.

    One process per folder sends at a time, so that nothing is sent twice.
    """
    spool = Spool(folder)
    send: Send | None = None
    backoff = BACKOFF_S[0]
    give_up: float | None = None
    with (folder / "sender.lock").open("w") as lock:
        locked = False
        while True:
            if ended.is_set() and give_up is None:
                give_up = time.monotonic() + drain_s
            locked = locked or try_lock(lock.fileno())
            tracking = read_tracking(folder) if locked else None
            batch = spool.unsent(BATCH) if tracking else []
            wait = POLL_S
            if tracking and batch:
                try:
                    send = send or connect(tracking)
                    send([line for _, line in batch])
                    spool.mark_sent(number for number, _ in batch)
                    backoff, wait = BACKOFF_S[0], 0.0
                except Exception as error:
                    print(
                        f"metrics: not sent yet ({type(error).__name__}: {error})",
                        file=sys.stderr,
                        flush=True,
                    )
                    wait, backoff = backoff, min(2 * backoff, BACKOFF_S[1])
            elif ended.is_set() and not spool.count_unsent():
                return
            if give_up is not None and time.monotonic() + wait >= give_up:
                return
            if ended.is_set():
                time.sleep(wait)
            else:
                ended.wait(wait)


def try_lock(fd: int) -> bool:
    """Become the folder's only sender, if there is none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_tracking(folder: Path) -> dict[str, Any] | None:
    """Where to send to, once known."""
    try:
        found: dict[str, Any] = json.loads((folder / "tracking.json").read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found


def main() -> None:
    """Leave the trainer's process tree, then read and send."""
    folder = Path(sys.argv[1])
    if os.fork():
        os._exit(0)
    os.nice(10)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "sender.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    ended = threading.Event()
    threading.Thread(target=read_lines, args=(folder, ended), daemon=True).start()
    deliver(folder, ended)


if __name__ == "__main__":
    main()
