"""This project's own engine, used as a training loop uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ckpt
from bench.engines.base import WAIT_S, Engine
from bench.places import Place, Prefix
from bench.spec import READ_THREADS, WRITE_THREADS
from bench.workload import Workload
from ckpt import retention
from ckpt.checkpoint import Fact
from ckpt.policies import Now
from ckpt.restore import restore_into
from flows.project import project_name

_POLL_S, _POLL_BUCKET_S = 0.01, 0.1


class _Asked:
    """A policy that saves when it was told to."""

    due = False

    def should_save(self, now: Now) -> bool:  # noqa: ARG002
        """Whether it was told to since it was last asked."""
        due, self.due = self.due, False
        return due


class _Keep:
    """A policy that keeps all until it is told to keep the newest only."""

    newest_only = False

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The names to keep."""
        return {fact.attempt for fact in (history[:1] if self.newest_only else history)}


class OwnEngine(Engine):
    """Digests everything while it writes, and verifies all of it while it restores."""

    title = project_name()
    note = "fsyncs, digests, restores verified"
    confirm = "digest"

    def __init__(self, max_failed_saves: int = 3) -> None:
        """`max_failed_saves`: how many in a row are taken before training is ended."""
        self._max_failed_saves = max_failed_saves

    def prepare(self, work: Workload, folder: Place) -> None:
        """Begin a run and its writer process."""
        self._uri = str(folder / "run")
        self._poll_s = _POLL_S
        if isinstance(folder, Prefix):
            self.note = "digests, reads back what it wrote, restores verified"
            self._poll_s = _POLL_BUCKET_S
        self._policy = _Asked()
        self._keep = _Keep()
        self._said: list[str] = []
        self._step, self._begun = 0, 0.0
        self._manager = ckpt.CheckpointManager(
            ckpt.open_run(self._uri),
            work.state,
            save=self._policy,
            keep=self._keep,
            max_failed_saves=self._max_failed_saves,
            threads=WRITE_THREADS,
            confirm=self.confirm,
            say=self._said.append,
        )

    def before_step(self) -> None:
        """Wait as the hook of the optimizer's step does, which then finds nothing left to wait for."""
        self._manager.wait_staged()

    def skip(self, step: int) -> None:
        """Tell the manager of the step, as a training loop does at every step."""
        self._manager.step(step)

    def save(self, step: int) -> None:
        """Let the manager begin a save."""
        self._step, self._begun = step, time.monotonic()
        self._policy.due = True
        if not self._manager.step(step):
            raise RuntimeError(f"no save began at step {step}; the last words: {self._said[-1:]}")

    def durable_at(self) -> float | None:
        """When the writer process had committed. Raises RuntimeError if the save was given up."""
        stats = self._manager.stats
        if stats.failed or stats.voided:
            raise RuntimeError(f"a save was not committed: {self._said[-1:]}")
        if stats.last is None or stats.last.step != self._step:
            return None
        return self._begun + stats.last.durable_s

    def wait_durable(self) -> float:
        """When the writer process had committed. Raises ckpt.StorageError if it could not."""
        self._manager.drain(WAIT_S)
        found = self.durable_at()
        if found is None:
            raise RuntimeError(f"the save of step {self._step} was not committed: {self._said[-1:]}")
        return found

    def wait_failed(self, number: int) -> None:
        """Return once that many saves in all have failed. Raises RuntimeError if one did not."""
        late = time.monotonic() + WAIT_S
        while (stats := self._manager.stats).failed < number:
            if stats.committed or time.monotonic() > late:
                raise RuntimeError(f"a save that had to fail did not: {stats}")
            time.sleep(_POLL_S)

    def discard(self, step: int) -> None:  # noqa: ARG002
        """Only the newest is left: by the manager, or without it where its windows are measured."""
        run = self._manager.run
        if not self._keep.newest_only:
            older = [checkpoint.attempt for checkpoint in ckpt.checkpoints(self._uri)[1:]]
            retention.prune(run.store, older, self._manager.launch.number)
            return
        late = time.monotonic() + WAIT_S
        while sum(entry.name.startswith("step-") for entry in run.store.list()) > 1:
            if time.monotonic() > late:
                raise TimeoutError(f"older checkpoints were not deleted; the last words: {self._said[-1:]}")
            time.sleep(self._poll_s)

    def keep_newest(self) -> None:
        """From the next commit on, the manager prunes."""
        self._keep.newest_only = True

    def load(self, step: int, target: Workload) -> None:
        """Restore, every chunk verified before anything live is touched."""
        run = ckpt.open_run(self._uri, create=False)
        restore_into(run, target.state, which=f"step:{step}", threads=READ_THREADS)

    def close(self) -> None:
        """End the writer process."""
        self._manager.close(save=False, timeout=WAIT_S)


class Unconfirmed(OwnEngine):
    """The same without reading back what it wrote to a bucket: how fast the upload alone is."""

    confirm = "size"
