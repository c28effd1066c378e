"""Metrics on their way to the tracking server: a table on disk that knows what was sent."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

BUSY_S = 30.0  # how long to wait for another process's transaction


class Line(NamedTuple):
    """One value of one metric; ``at`` is in milliseconds since 1970."""

    key: str
    step: int
    value: float
    at: int


class Spool:
    """A folder's metrics. The same value of a metric at a step is taken once, however often it is added.

    A run that goes on from a checkpoint repeats the steps since then bit for bit; those lines are known.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._table = sqlite3.connect(folder / "metrics.sqlite", timeout=BUSY_S)
        with self._table:
            self._table.execute(
                "CREATE TABLE IF NOT EXISTS line (id INTEGER PRIMARY KEY, key TEXT, step INTEGER, value TEXT,"
                " at INTEGER, sent INTEGER DEFAULT 0, UNIQUE (key, step, value))"
            )
            self._table.execute("CREATE INDEX IF NOT EXISTS unsent ON line (id) WHERE sent = 0")

    def add(self, lines: Iterable[Line]) -> None:
        """Take lines in. Values are kept as text: SQLite has no NaN."""
        rows = [(line.key, line.step, repr(line.value), line.at) for line in lines]
        with self._table:
            self._table.executemany(
                "INSERT OR IGNORE INTO line (key, step, value, at) VALUES (?,?,?,?)", rows
            )

    def unsent(self, limit: int) -> list[tuple[int, Line]]:
        """The oldest lines that were not sent, each with its number."""
        rows = self._table.execute(
            "SELECT id, key, step, value, at FROM line WHERE sent = 0 ORDER BY id LIMIT ?", (limit,)
        )
        return [(number, Line(key, step, float(value), at)) for number, key, step, value, at in rows]

    def mark_sent(self, numbers: Iterable[int]) -> None:
        """Note that these lines arrived."""
        with self._table:
            self._table.executemany(
                "UPDATE line SET sent = 1 WHERE id = ?", [(number,) for number in numbers]
            )

    def count_unsent(self) -> int:
        """How many lines wait."""
        count: int = self._table.execute("SELECT count(*) FROM line WHERE sent = 0").fetchone()[0]
        return count

    def close(self) -> None:
        """Close the table."""
        self._table.close()
