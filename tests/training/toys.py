"""A training problem small enough to run hundreds of times, that tells which samples it has seen."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from training.order import sample_rng


class Ids:
    """Samples that know their number. ``draws``: "own" randomness, or "global" from all three generators."""

    def __init__(self, size: int, draws: str, sleep: dict[int, float] | None = None) -> None:
        self.size = size
        self.own_randomness = draws == "own"
        self.sleep = sleep or {}
        table = np.random.Generator(np.random.Philox(key=7)).standard_normal((size, 8), dtype=np.float32)
        self.table = torch.from_numpy(table)

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int, epoch: int, seed: int) -> dict[str, torch.Tensor]:
        if index in self.sleep:
            time.sleep(self.sleep[index])
        if self.own_randomness:
            noise = float(sample_rng(seed, epoch, index).standard_normal())
        else:
            noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        inputs = self.table[index] + 0.1 * noise
        return {"id": torch.tensor(index), "inputs": inputs, "targets": torch.tensor(index % 3)}


class Toy:
    """``size`` samples to train on and 16 to validate on. ``sleep`` maps an index to seconds it takes."""

    def __init__(self, size: int = 64, draws: str = "own", sleep: dict | None = None) -> None:
        self.train = Ids(size, draws, {int(k): v for k, v in (sleep or {}).items()})
        self.val = Ids(16, "own")

    def identity(self) -> dict[str, object]:
        return {"data": "toy", "size": self.train.size}


class Net(nn.Module):
    """Linear, dropout, linear. ``trace``: a file that gets the ids of every training batch, a line each.

    ``at`` maps the number of a forward pass in this process to what happens in it: a signal's name,
    "raise", seconds to sleep, or "hang:FILE" (which it makes). ``eval_at`` does so for passes in evaluation.
    ``die_once``: a file; the 12th pass makes it and is killed, unless it is there already.
    """

    def __init__(
        self,
        hidden: int = 8,
        dropout: float = 0.2,
        trace: str | None = None,
        at: dict | None = None,
        eval_at: dict | None = None,
        die_once: str | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, hidden)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, 3)
        self._trace = trace
        self._events = {True: dict(at or {}), False: dict(eval_at or {})}
        self._passes = {True: 0, False: 0}
        self._die_once = die_once

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(functional.relu(self.first(inputs))))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._happen()
        if self.training and self._trace:
            with Path(self._trace).open("a") as out:
                print(*batch["id"].tolist(), file=out)
        return functional.cross_entropy(self(batch["inputs"]).float(), batch["targets"])

    def _happen(self) -> None:
        self._passes[self.training] += 1
        if self._die_once and self._passes[True] == 12 and not Path(self._die_once).exists():
            Path(self._die_once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        event = self._events[self.training].get(str(self._passes[self.training]))
        if isinstance(event, str) and event.startswith("hang:"):
            Path(event.removeprefix("hang:")).touch()
            time.sleep(600)
        elif event == "raise":
            raise ArithmeticError("the toy broke as it was told to")
        elif isinstance(event, str):
            os.kill(os.getpid(), getattr(signal, event))
        elif event:
            time.sleep(event)
