import gc
import json
import mmap
import os

import pytest
import torch
from torch import nn

from ckpt import faults
from ckpt.gather import Gather
from ckpt.guard import PLACES, VERSIONS, Guard, _OnDevice, _OnHost, _places
from ckpt.policies import EverySteps
from tests.ckpt.managing import manager, steps, wait_until


def pair(*tensors):
    keys = [f"t{i}" for i in range(len(tensors))]
    return tensors, Guard(keys, tensors, copies_of(tensors))


def copies_of(tensors):
    return [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]


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
    assert len(sample) <= PLACES * 64
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


ODD = {
    "channels_last": lambda: torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(40, 50).t(),
    "narrowed": lambda: torch.randn(40, 50)[:, 7:33],
    "every other": lambda: torch.randn(40, 50)[::2, ::2],
    "expanded": lambda: torch.randn(1, 50).expand(40, 50),
    "overlapping": lambda: torch.randn(200).as_strided((100, 20), (1, 3)),
    "complex128": lambda: torch.randn(30, 20, dtype=torch.complex128).t(),
    "int8": lambda: torch.randint(1, 100, (30, 20), dtype=torch.int8).t(),
    "scalar": lambda: torch.tensor(3.0),
    "ones in the shape": lambda: torch.randn(5, 1, 7, 1).permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_a_tensor_of_any_strides_is_sampled(made):
    live = made()
    copy = torch.zeros(live.shape, dtype=live.dtype)
    guard = Guard(["other", "odd"], [torch.ones(5), live], [torch.ones(5), copy])
    copy.copy_(live)
    taken = guard.take()
    assert guard.differs(taken) is None
    copy.copy_(live * 2)
    assert guard.differs(taken) == "odd"


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_a_device_reads_the_same_samples_as_the_host(made):
    live = [torch.ones(5), made()]
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in live]
    places = _places(live)
    device, host = _OnDevice(places, live, copies), _OnHost(places, live, copies)
    taken = device.take()
    assert taken.numpy().tobytes() == host.take() and device.differing(taken) is None
    copies[1].mul_(2)
    assert device.differing(taken) == 1


def test_every_place_of_an_odd_tensor_lies_where_its_copy_does():
    live = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    _, guard = pair(live)
    (sample,) = guard.take().samples
    seen = torch.frombuffer(bytearray(sample), dtype=torch.int64)
    assert len(seen) > 70 and guard.differs(guard.take()) is None


def test_a_small_tensor_beside_large_ones_is_looked_at():
    tensors = [torch.randn(1000, 1000), torch.zeros(1000), torch.randn(1000, 1000), torch.zeros(10)]
    for small in (1, 3):
        copies = copies_of(tensors)
        guard = Guard(list("abcd"), tensors, copies)
        taken = guard.take()
        copies[small].fill_(1)
        assert guard.differs(taken) == "abcd"[small]


@pytest.mark.parametrize(
    "shapes", [[(511,)], [(7,)] * 73, [(1,)] * 300, [(1000,)] * 255, [(5000, 300), (3,)], [(0,), ()]]
)
def test_there_are_never_too_many_places(shapes):
    _, guard = pair(*[torch.zeros(shape, dtype=torch.uint8) for shape in shapes])
    (samples,) = guard._samples
    assert 1 <= len(samples._numbers) <= PLACES


def test_places_do_not_all_hit_the_same_columns():
    live = torch.zeros(4096, 1024)
    (copy,) = copies = copies_of([live])
    guard = Guard(["t"], [live], copies)
    taken, seen = guard.take(), 0
    for column in range(0, 1024, 128):
        copy[:, column : column + 128] = 1
        seen += guard.differs(taken) is not None
        copy.zero_()
    assert seen == 8


def test_lazily_conjugated_or_negated_tensors_stay_out():
    conj = torch.randn(100, dtype=torch.complex64).conj()
    live = [conj, conj.imag]
    guard = Guard(["a", "b"], live, [t.clone().resolve_conj().resolve_neg() for t in live])
    assert guard.differs(guard.take()) is None


def test_a_write_to_any_of_many_tensors_is_seen_from_the_beginning_of_the_copy_on():
    tensors, guard = pair(*[torch.zeros(1) for _ in range(2 * VERSIONS + 5)])
    taken = guard.take()
    assert len(taken.versions) == VERSIONS and guard.written_to(taken) is None
    guard.note(taken)
    assert guard.written_to(taken) is None
    for number in (0, 1, 2, len(tensors) - 2, len(tensors) - 1):
        guard.note(taken := guard.take())
        tensors[number].add_(1)
        assert guard.written_to(taken) == f"t{number}"


def test_inference_tensors_have_no_version_but_samples():
    with torch.inference_mode():
        live = torch.zeros(100)
    (copy,) = copies = copies_of([live])
    guard = Guard(["t"], [live], copies)
    guard.note(taken := guard.take())
    assert guard.written_to(taken) is None
    copy.fill_(1)
    assert guard.differs(taken) == "t"


def channels_last():
    return nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(20))).to(memory_format=torch.channels_last)


def halve_weights(net):
    for conv in net:
        conv.weight.data.mul_(0.5)


def small_bias():
    return nn.Sequential(nn.Linear(2000, 1000), nn.Linear(1000, 2000), nn.Linear(2000, 10))


def fill_one_bias(net):
    net[0].bias.data.fill_(3.0)


@pytest.mark.parametrize(
    ("made", "write"), [(channels_last, halve_weights), (small_bias, fill_one_bias)], ids=["strides", "size"]
)
def test_a_tensor_overwritten_past_its_version_voids_the_save(tmp_path, monkeypatch, made, write):
    rule = {"match": "trainer:stage:begin", "nth": 1, "do": "delay", "seconds": 0.3}
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps([rule])))
    net = made()
    m = manager(tmp_path, {"net": net}, save=EverySteps(1))
    m.step(1)
    write(net)
    wait_until(lambda: m.stats.backlog == 0)
    m.close(save=False)
    assert m.stats.voided == 1 and steps(tmp_path) == []


def test_memory_that_is_gone_is_told_with_how_much_could_be_read():
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert Gather([(address, 8), (address + 64, 8)]).read() == bytes(16)
    with pytest.raises(OSError, match=r"Bad address after 8 of 16 bytes"):
        Gather([(address, 8), (8, 8)]).read()
    with pytest.raises(OSError, match=r"Bad address after 0 of 8 bytes"):
        Gather([(8, 8)]).read()
