import gc
import os

import torch

from ckpt.guard import PLACES, Guard


def pair(*tensors):
    keys = [f"t{i}" for i in range(len(tensors))]
    return tensors, Guard(keys, tensors, [t.clone() for t in tensors])


def test_an_unchanged_state_passes():
    _, guard = pair(torch.randn(1000, 100), torch.tensor(1.0), torch.arange(5), torch.empty(0))
    taken = guard.take()
    assert guard.differs(taken) is None and guard.written_to(taken) is None


def test_a_state_that_is_replaced_without_a_version_is_seen_and_named():
    live = torch.zeros(100_000)
    copy = torch.zeros(100_000)
    guard = Guard(["small", "big"], [torch.ones(3), live], [torch.ones(3), copy])
    taken = guard.take()
    copy.fill_(1)
    assert guard.differs(taken) == "big"


def test_writing_in_place_is_seen_by_the_version_wherever_it_hits():
    tensors, guard = pair(torch.zeros(10), torch.zeros(1_000_000))
    taken = guard.take()
    tensors[1][777_777] = 1
    assert guard.written_to(taken) == "t1"


def test_places_are_bounded_and_spread():
    tensors, guard = pair(*[torch.zeros(1000) for _ in range(3000)])
    (sample,) = before = guard.take().samples
    assert len(sample) <= (PLACES + 2) * 64
    seen = []
    for index in range(3000):
        tensors[index].data[:] = 1
        if guard.take().samples != before:
            seen.append(index)
            before = guard.take().samples
    assert len(seen) > PLACES // 2 and max(seen) > 2800


def test_memory_that_was_exchanged_is_still_readable_and_the_difference_is_named():
    live, copy = torch.ones(100_000), torch.ones(100_000)
    guard = Guard(["t"], [live], [copy])
    live.data = torch.zeros(100_000)
    taken = guard.take()
    assert guard.differs(taken) is None
    copy[:] = 0
    assert guard.differs(taken) == "t"


def test_a_guard_gives_its_descriptors_back():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        pair(torch.zeros(1000))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
