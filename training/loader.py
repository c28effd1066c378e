"""The batches of a run, in order, from any position."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from training import order, rng
from training.data.protocol import Split
from training.workers import Batch, Task, WorkerPool

AHEAD = 2  # tasks prepared in advance per worker


def collate(samples: Sequence[Mapping[str, Tensor]]) -> Batch:
    """Stack samples name by name along a new first dimension."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class BatchMaker:
    """Makes the batch of a task. What a sample draws at random depends on (seed, epoch, index) alone."""

    def __init__(self, split: Split, seed: int) -> None:
        self._split = split
        self._seed = seed
        self._seeds_itself = bool(getattr(split, "own_randomness", False))

    def __call__(self, task: Task) -> Batch:
        """Stack the task's samples; this process's random state stays as it was."""
        if self._seeds_itself:
            return collate([self._split.sample(index, epoch, self._seed) for epoch, index in task])
        with rng.kept():
            return collate([self._seeded(epoch, index) for epoch, index in task])

    def _seeded(self, epoch: int, index: int) -> Mapping[str, Tensor]:
        rng.seed_all(order.sample_seed(self._seed, epoch, index))
        return self._split.sample(index, epoch, self._seed)


class Loader:
    """Hands out each update's micro-batches for this rank.

    ``batch_size`` samples are used per update over all ranks, in ``accumulate`` micro-batches. The position
    is the caller's: what was prepared ahead but not used counts for nothing, so a resumed run sees it again.
    Raises ValueError if the batch cannot be shared out evenly.
    """

    def __init__(
        self,
        split: Split,
        seed: int,
        batch_size: int,
        accumulate: int = 1,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        close_fds: Sequence[int] = (),
    ) -> None:
        if batch_size < 1 or accumulate < 1 or batch_size % (accumulate * world_size):
            raise ValueError(
                f"trainer.batch_size={batch_size} cannot be shared evenly by trainer.accumulate="
                f"{accumulate} x {world_size} rank(s): make it a multiple of {accumulate * world_size}"
            )
        if not len(split):
            raise ValueError("the training data has no samples")
        self._size = len(split)
        self._seed = seed
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._rank, self._world_size = rank, world_size
        self._make = BatchMaker(split, seed)
        self._ahead: deque[int] = deque()  # positions of the updates that workers were given
        self._pool = WorkerPool(workers, self._make, close_fds) if workers else None
        self._depth = max(1, -(-AHEAD * workers // accumulate))

    def tasks(self, position: int) -> list[Task]:
        """This rank's micro-batches of the update that starts at ``position``."""
        drawn = order.samples(self._seed, self._size, position, self._batch_size)
        share = self._batch_size // self._world_size
        mine = drawn[self._rank * share : (self._rank + 1) * share]
        each = share // self._accumulate
        return [mine[start : start + each] for start in range(0, share, each)]

    def next(self, position: int) -> list[Batch]:
        """The micro-batches of the update that starts at ``position`` (samples since the beginning)."""
        if self._pool is None:
            return [self._make(task) for task in self.tasks(position)]
        if not self._ahead:
            self._ahead.append(position)
            self._give(position)
        if self._ahead[0] != position:
            raise ValueError(f"the next update prepared starts at sample {self._ahead[0]}, not at {position}")
        while len(self._ahead) <= self._depth:
            self._ahead.append(self._ahead[-1] + self._batch_size)
            self._give(self._ahead[-1])
        self._ahead.popleft()
        return [self._pool.take() for _ in range(self._accumulate)]

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def _give(self, position: int) -> None:
        assert self._pool is not None
        for task in self.tasks(position):
            self._pool.give(task)
