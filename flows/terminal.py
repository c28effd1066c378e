"""What a person sees: whole lines that stay, and one live line that is rewritten on a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

# Without a terminal the live line becomes plain lines, at most one in so many seconds.
PLAIN_EVERY_S = 10.0


def _nowhere(_: str) -> None:
    return None


class Terminal:
    """Writes from several threads, and from a signal handler, without tearing lines; each line that stays
    also goes to `echo`. A reader that went away is no error."""

    def __init__(self, out: TextIO | None = None, echo: Callable[[str], None] | None = None) -> None:
        self._out = out or sys.stdout
        self._echo = echo or _nowhere
        self._lock = threading.RLock()
        self._live = ""
        self._plain = ""
        self._tty = self._out.isatty()
        self._last_plain = float("-inf")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._write(f"\r\x1b[K{text}\n{self._live}" if self._live else f"{text}\n")
        self._echo(text)

    def live(self, text: str) -> None:
        """Replace the live line."""
        with self._lock:
            if self._tty:
                self._live = text[: max(20, shutil.get_terminal_size().columns - 1)]
                self._write(f"\r\x1b[K{self._live}")
            elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
                self._plain, self._last_plain = text, time.monotonic()
                self._write(f"{text}\n")
                self._echo(text)

    def settle(self, text: str | None = None) -> None:
        """End the live line; `text`, if given, replaces it for good."""
        with self._lock:
            if self._live:
                self._write(f"\r\x1b[K{text if text is not None else self._live}\n")
            elif text is not None and text != self._plain:
                self._write(f"{text}\n")
            self._live = ""

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            pass
