"""What is measured beside a save, and what is kept out of its window."""

import os
import threading
import time

import numpy as np
import pytest
import torch

from bench import busy, frequency, loop, paired, quiet
from bench.engines.base import Peer
from bench.gil import TURN_S, Probe, held_s
from bench.workload import Workload


class Lazy(Peer):
    """Writes a file without fsync, and deletes it when told to."""

    title = "lazy"

    def prepare(self, work, folder):
        super().prepare(work, folder)
        self.discarded = []

    def save(self, step):
        self.place(step).mkdir()
        (self.place(step) / "file").write_bytes(bytes(1 << 20))
        self.finished = time.monotonic()

    def discard(self, step):
        super().discard(step)
        self.discarded.append(step)

    def load(self, step, target):
        raise NotImplementedError


def training(folder, engine=None):
    work = Workload(100_000, 12, "cpu")
    engine = engine or Lazy()
    engine.prepare(work, folder)
    return loop.Loop(work, engine, 1)


def test_training_goes_on_unmeasured_until_a_save_is_written_back_and_deleted(tmp_path, monkeypatch):
    written, real = [], quiet.write_back

    def write_back(folder):
        written.append(list(tmp_path.iterdir()))
        real(folder)

    monkeypatch.setattr(quiet, "write_back", write_back)
    trained = training(tmp_path)
    trained.save(2)
    before = trained.step
    assert quiet.settle(trained, tmp_path) > 0
    assert trained.step > before
    assert trained.engine.discarded == [0]
    assert written == [[tmp_path / "step-0"], []]  # first what the save left, then the deletion
    monkeypatch.setattr(trained.engine, "discard", lambda step: (_ for _ in ()).throw(OSError("no")))
    trained.save(2)
    with pytest.raises(OSError, match="no"):
        quiet.settle(trained, tmp_path)


def test_each_save_has_its_samples_and_leaves_nothing_behind(tmp_path):
    trained = training(tmp_path)
    costs = paired.measure(trained, 3, 2, tmp_path)
    lists = [costs.stall_s, costs.join_s, costs.durable_s, costs.overhead_s, costs.steal_s, costs.writeback_s]
    assert {len(samples) for samples in lists} == {3}
    assert len(costs.control_s) == 4
    assert min(costs.stall_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_saving_often_deletes_what_is_not_needed_any_more(tmp_path):
    trained = training(tmp_path)
    seen = []
    save = trained.engine.save
    trained.engine.save = lambda step: (seen.append(len(list(tmp_path.iterdir()))), save(step))
    share = frequency.lost_share(trained, 2, 12, tmp_path)
    assert share > -1
    assert len(seen) == 6
    assert list(tmp_path.iterdir()) == []
    assert trained.engine.discarded == [12, 14, 16, 18, 20, 22]
    assert frequency.steps_for(7, quick=False) == 21
    assert frequency.steps_for(2, quick=False) == 20
    assert frequency.steps_for(3, quick=True) == 3


def test_what_the_host_takes_is_read_in_seconds(monkeypatch):
    text = "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1 1\n"
    monkeypatch.setattr(loop.Path, "read_text", lambda *_, **__: text)
    assert loop.steal_s() == 2.5
    monkeypatch.setattr(loop.Path, "read_text", lambda *_, **__: "cpu  1 2 3 4\n")
    assert loop.steal_s() == 0.0


def held_beside(work, seconds=0.4):
    """Seconds for which the probe found the lock taken beside a thread that does `work`, and in all."""
    probe = Probe()
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    until = time.perf_counter() + seconds
    held, total = probe.run(lambda: time.perf_counter() > until)
    stop.set()
    thread.join()
    return held, total


def test_a_thread_that_computes_in_python_holds_the_lock_and_one_that_waits_does_not():
    def compute(stop):
        while not stop.is_set():
            pass

    held, total = held_beside(compute)
    assert held > 0.5 * total  # nearly all of it on a machine that does nothing else
    held, total = held_beside(lambda stop: stop.wait())
    assert held < 0.05 * total


@pytest.mark.parametrize("hold_s, pause_s", [(20e-6, 80e-6), (50e-6, 310e-6), (1e-3, 4e-3), (30e-3, 50e-3)])
def test_a_lock_is_seen_for_as_long_as_it_is_held_however_short_each_time(hold_s, pause_s):
    waking_s, now, waits = 120e-6, 0.0, []
    rng = np.random.default_rng(0)
    while now < 4.0:
        now += rng.exponential(TURN_S)
        left = hold_s - now % (hold_s + pause_s)
        if left > 0:  # the lock is taken: until it is free again, and then until the probe is awake
            waits.append(left + waking_s)
            now += left + waking_s
    assert held_s(waits, waking_s) == pytest.approx(now * hold_s / (hold_s + pause_s), rel=0.1)


def test_the_threads_may_run_where_they_could_before_the_probe():
    allowed = os.sched_getaffinity(0)
    held_beside(lambda stop: stop.wait(), seconds=0.1)
    assert os.sched_getaffinity(0) == allowed


def test_what_a_device_does_at_the_same_time_counts_once():
    assert busy.covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert busy.covered([]) == 0.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_busy_for_a_share_of_the_time_with_and_without_saves(tmp_path):
    work = Workload(50_000_000, 12, "cuda")
    engine = Lazy()
    engine.prepare(work, tmp_path)
    shares = busy.measure(loop.Loop(work, engine, 256), 2, 4, tmp_path)
    assert len(shares["control"]) == len(shares["save"]) == 2
    assert all(0 < share <= 1.01 for each in shares.values() for share in each)
