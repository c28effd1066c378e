import pytest
import torch
from torch import nn

from ckpt import capacity
from ckpt.errors import StorageError
from ckpt.store import open_store
from ckpt.stores.folder import FolderStore

GIB = 1 << 30


def test_memory_that_cannot_hold_the_staging_is_refused_with_numbers():
    refusal = capacity.check_memory(3 * GIB, available=2 * GIB).refusal
    assert "3.00 GiB" in refusal and "2.00 GiB" in refusal
    assert capacity.check_memory(int(1.9 * GIB), available=2 * GIB).warning
    assert capacity.check_memory(GIB, available=2 * GIB) == (None, None)
    with pytest.raises(StorageError, match=r"3\.00 GiB"):
        capacity.settle(capacity.check_memory(3 * GIB, available=2 * GIB))


def test_a_disk_too_small_for_one_is_refused_and_for_all_that_are_kept_warned_of(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "not" / "yet"))
    assert store.free() > 0
    monkeypatch.setattr(FolderStore, "free", lambda _: 25 * GIB)
    assert "30.00 GiB" in capacity.check_disk(store, 30 * GIB, 1).refusal
    assert "keeping 10" in capacity.check_disk(store, 10 * GIB, 10).warning
    assert capacity.check_disk(store, GIB, 10) == (None, None)
    assert capacity.check_disk(store, 10 * GIB, None).warning


def test_the_state_to_come_is_estimated_before_the_first_step():
    model = nn.Linear(100, 100, bias=False)
    one = model.weight.nbytes
    assert capacity.estimate({"m": model, "o": torch.optim.AdamW(model.parameters()), "x": 3}) == 3 * one
    assert capacity.estimate({"m": model, "o": torch.optim.SGD(model.parameters(), lr=1.0)}) == one
    assert capacity.estimate({"o": torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)}) == one


def test_available_memory_is_known_here():
    assert 0 < capacity.available_memory() < 1 << 50
