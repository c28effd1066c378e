"""No checkpoint, but the least that each of them does: copy the state, move as many bytes to the disk."""

from __future__ import annotations

from bench.copying import Copier
from bench.disk import raw
from bench.engines.base import Engine
from bench.places import Place, Prefix
from bench.workload import Workload


class Floor(Engine):
    """Copies beside forward and backward; a process without torch writes and fsyncs raw bytes meanwhile."""

    title = "raw copy + write, no checkpoint"
    note = ""

    def prepare(self, work: Workload, folder: Place) -> None:
        """Make the memory to copy into and start the helper."""
        if isinstance(folder, Prefix):
            self.title = "raw copy + PUT, no checkpoint"
        self._copier = Copier(work)
        self._disk = raw(folder / "raw", work.nbytes)

    def before_step(self) -> None:
        """Return when the state is copied."""
        self._copier.join()

    def skip(self, step: int) -> None:
        """Nothing to do."""

    def save(self, step: int) -> None:  # noqa: ARG002
        """Begin to copy and to write."""
        self._disk.begin("write")
        self._copier.begin()

    def durable_at(self) -> float | None:
        """When the helper had fsynced. Raises OSError if it could not."""
        moved = self._disk.done()
        return None if moved is None else moved.at

    def wait_durable(self) -> float:
        """When the helper had fsynced. Raises OSError if it could not."""
        return self._disk.wait().at

    def discard(self, step: int) -> None:  # noqa: ARG002
        """Delete the file."""
        self._disk.remove()

    def keep_newest(self) -> None:
        """There is one file at most."""

    def load(self, step: int, target: Workload) -> None:
        """There is nothing to load."""
        raise NotImplementedError("nothing was saved")

    def close(self) -> None:
        """End the thread and the helper."""
        self._copier.close()
        self._disk.close()
