"""What a writer did after its trainer's death, written down beside the ranks' logs."""

import threading
from datetime import UTC, datetime
from typing import Any

from ckpt import names
from ckpt.errors import StorageError
from ckpt.store import Store


class LastWords:
    """A short log file of one writer, made only when there is something to say and nobody to say it to."""

    def __init__(self, store: Store, launch: int, rank: int) -> None:
        self._store = store
        self._folder = f"{names.LOGS}/{launch:05d}"
        self._key = f"{self._folder}/writer-{rank:05d}.log"
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Write one event down; a storage that fails is passed over, since nobody could be told."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._lock:
            self._lines.append(" ".join([now, kind, *(f"{name}={value}" for name, value in fields.items())]))
            try:
                self._store.make_dir(self._folder)
                self._store.put(self._key, ("\n".join(self._lines) + "\n").encode(), durable=False)
            except StorageError:
                return
