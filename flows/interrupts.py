"""Ctrl-C at the command line: once saves and stops, twice leaves at once. SIGTERM is Prefect's own
business."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

EXIT_CODE = 130


class Interrupts:
    """Counts Ctrl-C. The first calls `stop`, the second `leave` and then ends this process on the spot."""

    def __init__(self, stop: Callable[[], None], leave: Callable[[], None]) -> None:
        self._stop = stop
        self._leave = leave
        self.count = 0

    def install(self) -> None:
        """From now on, in this process's main thread."""
        signal.signal(signal.SIGINT, self._on_signal)

    def seen(self) -> bool:
        """Whether there was any."""
        return self.count > 0

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            self._stop()
            return
        try:
            self._leave()
        finally:
            os._exit(EXIT_CODE)
