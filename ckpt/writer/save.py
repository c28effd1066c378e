"""One attempt as the writer process knows it: its arena, and what the trainer has said about it so far."""

import threading
import time
from typing import Any

from ckpt.arena import Arena

_POLL_FIRST_S = 0.001
_POLL_LAST_S = 0.02


class VoidError(Exception):
    """The attempt is void: aborted, or its trainer died before it was sealed."""


class Save:
    """The shared state of one attempt; all methods may be called from any thread.

    size: bytes of the shard. tensors: the part's `tensors` entry, derived from the shard's layout.
    """

    def __init__(self, attempt: str, arena: Arena, size: int, tensors: dict[str, Any]) -> None:
        self.attempt = attempt
        self.arena = arena
        self.size = size
        self.tensors = tensors
        self.begun = time.monotonic()
        self.changed = threading.Condition()
        self.part: dict[str, Any] | None = None
        self.durable = False
        self.committed = False
        self.urgent = False
        self.stopped: str | None = None

    def seal(self, part: dict[str, Any]) -> None:
        """The state is whole: `part` is this rank's part of the manifest, still without its file."""
        with self.changed:
            self.part = part
            self.changed.notify_all()

    def stop(self, reason: str) -> None:
        """Make the attempt void; a part that is already durable stays for `discard` to remove."""
        with self.changed:
            self.stopped = self.stopped or reason
            self.changed.notify_all()

    def stop_unless_sealed(self, reason: str) -> None:
        """Make the attempt void if its state was never said to be whole."""
        with self.changed:
            if self.part is None:
                self.stop(reason)

    def hurry(self) -> None:
        """Somebody waits for this attempt: go on at normal priority."""
        with self.changed:
            self.urgent = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise VoidError if the attempt is void."""
        if self.stopped is not None:
            raise VoidError(self.stopped)

    def pause(self, seconds: float) -> None:
        """Sleep, but raise VoidError as soon as the attempt is void."""
        deadline = time.monotonic() + seconds
        with self.changed:
            self.check()
            while (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
                self.check()

    def wait_staged(self, nbytes: int) -> None:
        """Return once the first `nbytes` of the shard are staged; VoidError if that can no longer happen."""
        poll = _POLL_FIRST_S
        with self.changed:
            while True:
                self.check()
                if self.part is not None or self.arena.watermark >= nbytes:
                    return
                self.changed.wait(poll)
                poll = min(_POLL_LAST_S, poll * 1.5)

    def wait_sealed(self) -> dict[str, Any]:
        """The part, once the trainer has sealed the attempt; VoidError if it is void instead."""
        with self.changed:
            while self.part is None:
                self.check()
                self.changed.wait()
            self.check()
            return self.part
