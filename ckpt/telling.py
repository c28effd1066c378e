"""Hands events to a callback in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MOST = 1000


class Teller:
    """Calls the callback with one event after the other, in order; a slow callback holds nobody up.

    Of a callback that hangs, at most a thousand events wait; those that come then are left out, which is
    said.
    """

    def __init__(self, call: Callable[[dict[str, Any]], None] | None, say: Callable[[str], None]) -> None:
        self._call = call
        self._say = say
        self._left_out = 0
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckpt-events", daemon=True)
        if call is not None:
            self._thread.start()

    def tell(self, event: dict[str, Any]) -> None:
        """Hand one event over and return at once; a failure is also said."""
        if self._call is not None:
            if self._events.qsize() < _MOST:
                self._events.put(event)
            else:
                self._left_out += 1
        if event["state"] == "failed":
            self._say(f"the save of step {event['step']} was not committed: {event['error']}")

    def close(self, timeout_s: float) -> None:
        """Return when the callback has had all events, or after `timeout_s`."""
        if self._call is not None and threading.current_thread() is not self._thread:
            self._events.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        assert self._call is not None
        while (event := self._events.get()) is not None:
            with suppress(Exception):
                self._call(event)
            if self._left_out:
                left_out, self._left_out = self._left_out, 0
                with suppress(Exception):
                    self._say(f"on_event is too slow: {left_out} events were left out")
