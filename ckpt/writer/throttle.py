"""The optional bandwidth cap: a token bucket shared by the writer's threads."""

import threading
import time


class Throttle:
    """Books writes so that their sum stays at `rate` bytes/s (None: no limit), bursts of `burst` bytes."""

    def __init__(self, rate: float | None, burst: int) -> None:
        self.rate = rate
        self._burst = burst
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def reserve(self, nbytes: int) -> float:
        """Book `nbytes` and return how many seconds to wait before writing them."""
        if self.rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._paid_until, now - self._burst / self.rate)
            self._paid_until = start + nbytes / self.rate
            return max(0.0, self._paid_until - now)
