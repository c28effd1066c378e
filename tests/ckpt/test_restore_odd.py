"""Restoring into tensors that can't be written to like others, and what it leaves of others' memory."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import restore_plan
from ckpt.byte_copies import bytes_of
from ckpt.errors import StateError
from ckpt.policies import EverySteps
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.managing import manager
from tests.ckpt.restoring import same_bits, save, small, tensors_of, train


class Lazy(nn.Module):
    """Parameters and buffers with lazy bits of every kind, large and small."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conj = nn.Parameter(torch.randn(40, 30, dtype=torch.complex64).conj())
        self.large = nn.Parameter(torch.randn(400, 500, dtype=torch.complex64).conj())
        self.neg = nn.Parameter(torch.randn(20, dtype=torch.complex64).conj().imag)
        self.turned = nn.Parameter(torch.randn(6, 7, dtype=torch.complex128).conj().t())
        self.register_buffer("whole", torch._neg_view(torch.randint(1, 99, (9,), dtype=torch.int8)))
        self.plain = nn.Parameter(torch.randn(50))


def inference(seed, width=600):
    with torch.inference_mode():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Conv2d(3, 8, 3))


def restore(path, state):
    return restore_into(open_run(str(path), create=False), state)


def alike(one, two):
    left, right = tensors_of({"m": one}), tensors_of({"m": two})
    return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)


@pytest.mark.parametrize("made", [Lazy, inference])
def test_odd_tensors_are_restored_in_place(tmp_path, made):
    saved, live = made(1), made(2)
    save(tmp_path / "r", {"m": saved}, 1)
    before = {name: (id(t), t.data_ptr()) for name, t in live.state_dict(keep_vars=True).items()}
    assert not alike(saved, live)
    restore(tmp_path / "r", {"m": live})
    assert alike(saved, live)
    assert before == {name: (id(t), t.data_ptr()) for name, t in live.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("made", [Lazy, inference])
def test_odd_tensors_are_saved_and_restored_by_a_manager(tmp_path, made):
    saved, live = made(1), made(2)
    m = manager(tmp_path, {"m": saved}, save=EverySteps(1))
    m.step(1)
    m.close()
    assert m.stats.voided == 0
    restore(tmp_path / "run", {"m": live})
    assert alike(saved, live)


def test_a_tensor_that_can_not_be_filled_is_told_as_a_mixed_state(tmp_path, monkeypatch):
    def refuse(copies):
        if any(copy.live for copy in copies):
            raise RuntimeError("no")

    save(tmp_path / "r", small(1), 1)
    monkeypatch.setattr(restore_plan, "write_all", refuse)
    with pytest.raises(StateError, match=r"RuntimeError: no\); the state may now be mixed"):
        restore(tmp_path / "r", small(2))


def test_storages_can_still_be_resized_after_saving_and_restoring(tmp_path):
    state = small(1, width=70_000)
    train(state, 1)
    save(tmp_path / "r", state, 1)
    fresh = small(2, width=70_000)
    restore(tmp_path / "r", fresh)
    slots = [t for held in fresh["optim"].state.values() for t in held.values()]
    assert max(t.nbytes for t in slots) >= 1 << 20
    for tensor in [*fresh["model"].parameters(), *slots]:
        tensor.untyped_storage().resize_(0)


def test_the_bytes_of_a_tensor_are_its_memory_and_keep_it():
    tensor = torch.arange(10)[2:6]
    seen = bytes_of(tensor)
    assert seen.dtype == np.uint8 and seen.tobytes() == np.arange(2, 6).tobytes()
    seen[:8] = 0
    assert tensor[0] == 0
    held = weakref.ref(seen.base)
    view = seen[8:16]
    del tensor, seen
    gc.collect()
    assert held() is not None and view[0] == 3
    del view
    assert held() is None


def test_a_storage_that_was_freed_is_refused_not_read():
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(100)
    with pytest.raises(StateError, match="needs 4000 bytes of its storage, which has 100 now"):
        bytes_of(tensor)
