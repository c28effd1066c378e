import os
import random
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.training.toys import Toy
from training.loader import Loader
from training.workers import pack, unpack


@pytest.fixture
def loaders():
    made = []

    def make(**options):
        data = options.pop("data", None) or Toy(**options.pop("toy", {}))
        made.append(Loader(data.train, **{"seed": 2, "batch_size": 8, "accumulate": 2, **options}))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def taken(loader, updates, start=0):
    found = []
    for update in range(updates):
        found.extend(loader.next(start + update * 8))
    return found


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("draws", ["own", "global"])
def test_worker_processes_change_no_sample(loaders, draws):
    alone = taken(loaders(toy={"draws": draws}), 12)
    for workers in (1, 2, 3):
        assert same(taken(loaders(workers=workers, toy={"draws": draws}), 12), alone)


def test_samples_that_draw_from_global_generators_leave_training_as_it_was(loaders):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    taken(loaders(toy={"draws": "global"}), 2)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


def test_f1_what_was_prefetched_but_not_used_is_seen_again(loaders):
    whole = taken(loaders(workers=2), 12)
    first = taken(loaders(workers=2), 5)
    rest = taken(loaders(workers=2), 7, start=40)
    assert same(first + rest, whole)


def test_ranks_share_each_batch_without_overlap(loaders):
    alone = taken(loaders(batch_size=8, accumulate=1), 4)
    halves = [taken(loaders(batch_size=8, accumulate=1, rank=rank, world_size=2), 4) for rank in range(2)]
    for whole, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(torch.cat([left["id"], right["id"]]), whole["id"])


def test_a_batch_that_cannot_be_shared_evenly_is_refused_with_numbers(loaders):
    with pytest.raises(ValueError, match=r"batch_size=10 .*multiple of 4"):
        loaders(batch_size=10, accumulate=2, world_size=2)


class Broken:
    own_randomness = True

    def __init__(self, what):
        self.train = self
        self.what = what

    def __len__(self):
        return 64

    def sample(self, index, epoch, seed):
        if self.what == "raise":
            raise LookupError(f"no row {index}")
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_in_a_worker_is_raised_with_its_cause(loaders):
    with pytest.raises(RuntimeError, match="LookupError: no row"):
        loaders(data=Broken("raise"), workers=2).next(0)


def test_a_worker_that_was_killed_is_named_with_its_signal(loaders):
    with pytest.raises(RuntimeError, match=r"data worker 0 \(pid \d+\) was killed by SIGKILL"):
        loaders(data=Broken("kill"), workers=2).next(0)


def test_workers_ignore_the_signals_that_stop_a_trainer(loaders):
    loader = loaders(workers=2)
    loader.next(0)
    for pid in loader._pool.pids:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert same(taken(loader, 8, start=8), taken(loaders(), 8, start=8))


TRAINER = """
import sys, time
from tests.training.toys import Toy
from training.loader import Loader
slow = {i: 60 for i in range(64)} if sys.argv[1] == "busy" else None
loader = Loader(Toy(sleep=slow).train, 0, 4, workers=2)
print(*loader._pool.pids, flush=True)
loader.next(0)
print("idle", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_die_with_a_trainer_that_is_killed(state):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, state], stdout=subprocess.PIPE, text=True)
    try:
        fds = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        if state == "idle":
            assert trainer.stdout.readline() == "idle\n"
        trainer.kill()
        deadline = time.monotonic() + 10
        for fd in fds:
            assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], "a worker lives on"
            os.close(fd)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_every_dtype_and_shape_crosses_to_the_trainer():
    batch = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2**40),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "complex": torch.randn(2, dtype=torch.complex64),
        "strided": torch.arange(12.0).view(3, 4).T,
    }
    listed, data = pack(batch)
    got = unpack(listed, bytearray(data))
    assert got.keys() == batch.keys()
    assert all(got[k].dtype == batch[k].dtype and torch.equal(got[k], batch[k]) for k in batch)
