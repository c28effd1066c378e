"""A rank's end of the control socket: events out, stop requests in."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FLOW_GONE = "the process that started training is gone"


class Control:
    """Sends events as JSON lines, each with "t" (``time.monotonic()`` seconds). Never raises or blocks long.

    Without a path (a rank started by hand) events go nowhere and no stop ever arrives.
    """

    def __init__(self, path: str | None, rank: int, restart: int, log: str | None, pid: int) -> None:
        self.rank = rank
        self.flow_gone = False
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        if path:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.connect(path)
            self._sock.settimeout(5.0)
            self._send({"hello": True, "rank": rank, "restart": restart, "pid": pid, "log": log})

    def event(self, name: str, **fields: Any) -> None:
        """Send an event; only rank 0's reach the flow, but for errors and log files."""
        if self.rank == 0 or name in ("error", "log"):
            self._send({"event": name, "t": time.monotonic(), "rank": self.rank, **fields})

    def listen(self, on_stop: Callable[[str, str], None]) -> None:
        """Call ``on_stop(reason, outcome)`` from a thread when a stop is asked for or the flow is gone."""
        if self._sock is not None:
            threading.Thread(target=self._listen, args=(on_stop,), name="control", daemon=True).start()

    def close(self) -> None:
        """End the connection: this rank has nothing more to say."""
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """The socket, for children to close; -1 without one."""
        return -1 if self._sock is None else self._sock.fileno()

    def _send(self, message: dict[str, Any]) -> None:
        if self._sock is None:
            return
        data = json.dumps(message, default=str).encode() + b"\n"
        with self._lock, suppress(OSError):  # a flow that is gone is noticed by the listener
            self._sock.sendall(data)

    def _listen(self, on_stop: Callable[[str, str], None]) -> None:
        assert self._sock is not None
        reader = socket.socket(fileno=socket.dup(self._sock.fileno()))
        reader.settimeout(None)
        pending = b""
        while True:
            try:
                data = reader.recv(4096)
            except OSError:
                data = b""
            if not data:
                self.flow_gone = True
                on_stop(FLOW_GONE, "preempted")
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in filter(None, lines):
                message = json.loads(line)
                on_stop(message["stop"], message.get("as", "preempted"))
