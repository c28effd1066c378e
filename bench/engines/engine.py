"""This project's own engine, used as a training loop uses it."""

from __future__ import annotations

import time
from pathlib import Path

import ckpt
from bench.engines.base import WAIT_S, Engine
from bench.spec import READ_THREADS, WRITE_THREADS
from bench.workload import Workload
from ckpt.policies import Now
from ckpt.restore import restore_into
from flows.project import project_name


class _Asked:
    """A policy that saves when it was told to."""

    due = False

    def should_save(self, now: Now) -> bool:  # noqa: ARG002
        """Whether it was told to since it was last asked."""
        due, self.due = self.due, False
        return due


class OwnEngine(Engine):
    """Digests everything while it writes, and verifies all of it while it restores."""

    title = project_name()
    note = "fsyncs, digests, restores verified; its pruning runs beside the measured steps"

    def prepare(self, work: Workload, folder: Path) -> None:
        """Begin a run and its writer process."""
        self._uri = str(folder / "run")
        self._policy = _Asked()
        self._said: list[str] = []
        self._step, self._begun = 0, 0.0
        self._manager = ckpt.CheckpointManager(
            ckpt.open_run(self._uri),
            work.state,
            save=self._policy,
            keep=ckpt.KeepLast(1),
            threads=WRITE_THREADS,
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

    def discard(self, step: int) -> None:
        """The manager prunes by itself."""

    def load(self, step: int, target: Workload) -> None:
        """Restore, every chunk verified before anything live is touched."""
        run = ckpt.open_run(self._uri, create=False)
        restore_into(run, target.state, which=f"step:{step}", threads=READ_THREADS)

    def close(self) -> None:
        """End the writer process."""
        self._manager.close(save=False, timeout=WAIT_S)
