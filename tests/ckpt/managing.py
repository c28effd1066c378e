"""A small training run under a manager, for tests of saving."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ckpt
from ckpt.manager import CheckpointManager

ROOT = Path(__file__).resolve().parents[2]


class Toy:
    """A net with a buffer that moves in forward, AdamW with two groups, and a schedule."""

    def __init__(self, seed=0, width=32):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        groups = [{"params": list(self.model[:2].parameters())}, {"params": list(self.model[2].parameters())}]
        self.optim = torch.optim.AdamW(groups, lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 4)
        self.generator = torch.Generator().manual_seed(7)
        self.count = {"step": 0}

    @property
    def state(self):
        return {"model": self.model, "optim": self.optim, "sched": self.sched, "count": self.count}

    def train(self, closure_only=False):
        x = torch.randn(16, 8, generator=self.generator)
        self.optim.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optim.step()
        self.sched.step()
        self.count["step"] += 1
        return loss.item()


def manager(tmp_path, state, **options):
    """A manager over the run `tmp_path/run` that collects what it says and tells in `.said` and `.events`."""
    said, events = [], []
    made = CheckpointManager(str(tmp_path / "run"), state, say=said.append, on_event=events.append, **options)
    made.said, made.events = said, events
    return made


def copy_of(state):
    """All tensors of modules and optimizers, copied, by the names they are stored under."""
    from ckpt.flatten import flatten

    return {key: entry.tensor.detach().clone() for key, entry in flatten(state).tensors.items()}


def stored(tmp_path, step=None):
    """The tensors of a run's newest checkpoint, or that of a step, by their full names."""
    found = ckpt.checkpoints(str(tmp_path / "run"))
    return ckpt.load_tensors(next(c for c in found if step in (None, c.step)), prefix="")


def same(left, right):
    """Whether two dicts of tensors are equal to the bit, dtypes and shapes included."""
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and torch.equal(left[k], right[k])
        for k in left
    )


def steps(tmp_path):
    return [c.step for c in ckpt.checkpoints(str(tmp_path / "run"))]


def wait_until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def run_python(code, *args, faults=None, timeout=120, **env):
    """Run a script in a process of its own, where fault rules apply; returns what it printed as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    if faults is not None:
        environment["CKPT_FAULTS"] = json.dumps(faults)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
