"""One flag for every way to be asked to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequested(BaseException):
    """Raised in the main thread where waiting is safe to leave; no ``except Exception`` may eat it."""


class Stop:
    """The first request counts; later ones change nothing.

    Whoever asks, a signal handler in the main thread takes note, so that even a blocking call there is woken.
    Inside ``interruptible()`` it raises ``StopRequested``: only for waiting that has changed no state yet.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.outcome = "preempted"
        self.since = 0.0
        self.on_request: Callable[[], None] = lambda: None
        self._interruptible = False

    def install(self) -> None:
        """Take over SIGTERM, SIGUSR1 and SIGINT. Call it from the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def request(self, reason: str, outcome: str = "preempted") -> None:
        """Ask from any thread."""
        self._note(reason, outcome)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.reason is not None

    def left(self, grace_s: float) -> float:
        """Seconds that remain of the time for stopping, at least 1."""
        return max(1.0, self.since + grace_s - time.monotonic())

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise ``StopRequested`` at once when a stop is, or was, asked for."""
        try:
            self._interruptible = True
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._interruptible = False

    def _note(self, reason: str, outcome: str) -> None:
        if self.reason is None:
            self.since = time.monotonic()
            self.outcome = outcome
            self.reason = reason
            self.on_request()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._note(f"signal {signal.Signals(number).name}", "preempted")
        if self._interruptible:
            self._interruptible = False
            raise StopRequested
