"""What a checkpoint engine has to offer to be measured."""

from __future__ import annotations

import shutil
import time
from abc import abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from bench.places import Place

if TYPE_CHECKING:
    from bench.workload import Workload

WAIT_S = 600.0


class Absent(Exception):  # noqa: N818
    """The engine can't be had here; the text says why."""


class Engine(Protocol):
    """One save may be in flight at a time. Times are seconds on the monotonic clock.

    title: what the table calls it. note: what has to be known to compare it fairly, or "".
    """

    title: str
    note: str

    def prepare(self, work: Workload, folder: Place) -> None:
        """Get ready to save `work` into `folder`, an empty one; what a user does before training."""

    def before_step(self) -> None:
        """Return when the optimizer may change the state."""

    def skip(self, step: int) -> None:
        """A step boundary at which nothing is saved."""

    def save(self, step: int) -> None:
        """Begin a save; returns when training may go on to the next forward and backward."""

    def durable_at(self) -> float | None:
        """When the last save was whole on storage, by the writer's own clock if it has one; None before."""

    def wait_durable(self) -> float:
        """As `durable_at`, once it is. Raises what made the save fail, TimeoutError after `WAIT_S`."""

    def discard(self, step: int) -> None:
        """Give back the storage of a durable save, or of all before it; back once that is done."""

    def keep_newest(self) -> None:
        """From here on the engine deletes older saves by itself, if it can."""

    def load(self, step: int, target: Workload) -> None:
        """Bring `target` to what was saved at `step`."""

    def close(self) -> None:
        """Finish what is in flight and end all that runs in the background."""


class Peer(Engine):
    """What the engines have in common that keep one folder per save and nothing else."""

    note = ""

    def prepare(self, work: Workload, folder: Place) -> None:
        """Remember where and what."""
        self.work = work
        self.folder = folder
        self.finished: float | None = None

    def place(self, step: int) -> Place:
        """The folder of one save."""
        return self.folder / f"step-{step}"

    def before_step(self) -> None:
        """Nothing to wait for."""

    def skip(self, step: int) -> None:
        """Nothing to do."""

    def durable_at(self) -> float | None:
        """When the save returned."""
        return self.finished

    def wait_durable(self) -> float:
        """When the save returned."""
        assert self.finished is not None
        return self.finished

    def discard(self, step: int) -> None:
        """Remove the folder."""
        shutil.rmtree(str(self.place(step)), ignore_errors=True)

    def keep_newest(self) -> None:
        """It never deletes anything by itself."""

    def close(self) -> None:
        """Nothing runs in the background."""


class InFuture(Peer):
    """A peer whose save ends in a future."""

    _upload: Future[Any] | None = None

    def follow(self, upload: Future[Any]) -> None:
        """The future of the save that has just begun."""
        self.finished = None
        self._upload = upload
        upload.add_done_callback(self._done)

    def durable_at(self) -> float | None:
        """When the future was done. Raises what it raised."""
        return self.wait_durable() if self._upload is not None and self._upload.done() else None

    def wait_durable(self) -> float:
        """When the future was done. Raises what it raised."""
        assert self._upload is not None
        self._upload.result(WAIT_S)
        while self.finished is None:  # a future is done a moment before its callbacks are
            time.sleep(0)
        return self.finished

    def close(self) -> None:
        """Wait for the last save."""
        if self._upload is not None:
            self._upload.result(WAIT_S)

    @abstractmethod
    def save(self, step: int) -> None:
        """Begin a save and `follow` its future."""

    def _done(self, _: Future[Any]) -> None:
        self.finished = time.monotonic()
