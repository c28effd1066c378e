"""Metrics leave the trainer here: a queue, a thread, and a pipe to a process that may be slow."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

QUEUED = 10_000  # steps; beyond that the oldest are given up, so that training's memory stays bounded
RESTARTS = 3


class Metrics:
    """``put`` returns at once whatever happens to the sender, the disk or the tracking server. Any thread
    may call it.

    The sender starts with the first line. ``spool`` is its folder; None sends nothing anywhere.
    """

    def __init__(self, spool: Path | None) -> None:
        self._spool = spool
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.dropped = 0

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        if self._spool is None or not values:
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._forward, name="metrics", daemon=True)
                self._thread.start()
        line = {"step": step, "at": time.time_ns() // 1_000_000, "values": dict(values)}
        self._push(json.dumps(line).encode() + b"\n")

    def close(self, timeout: float = 2.0) -> None:
        """Hand over what is queued, for at most ``timeout`` seconds. The sender goes on by itself."""
        if self._thread is not None:
            self._push(None)
            self._thread.join(timeout)

    def _push(self, line: bytes | None) -> None:
        while True:
            try:
                self._queue.put_nowait(line)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._queue.get_nowait()
                    self.dropped += 1

    def _forward(self) -> None:
        for _ in range(RESTARTS):
            with suppress(OSError):
                sender = self._start()
                assert sender.stdin is not None
                with sender.stdin as pipe:
                    while (line := self._queue.get()) is not None:
                        pipe.write(line)
                        pipe.flush()
                return

    def _start(self) -> subprocess.Popen[bytes]:
        sender = subprocess.Popen(
            [sys.executable, "-m", "training.metrics_sender", str(self._spool)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        sender.wait()  # it forks once, out of this process's tree, and leaves the pipe to its child
        return sender
