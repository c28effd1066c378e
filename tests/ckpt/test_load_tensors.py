"""Tensors by name, without a model and without a process group."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.digest import CHUNK
from ckpt.errors import Corrupt, NotCommitted
from ckpt.names import shard_name
from tests.ckpt.making import checkpoint, flip, run_at, tensors
from tests.ckpt.restoring import header_length, same_bits, save, shard, small, tensors_of, train


def test_a_models_tensors_load_by_the_names_that_load_state_dict_takes(tmp_path):
    state = small(1)
    train(state, 2)
    made = save(tmp_path / "r", state, 2)
    for where in (made, made.uri, f"file://{made.uri}"):
        other = small(2)["model"]
        assert other.load_state_dict(ckpt.load_tensors(where)).missing_keys == []
        assert tensors_of({"model": other}).keys() == tensors_of({"model": state["model"]}).keys()
        live = state["model"].state_dict()
        assert all(same_bits(tensor, live[key]) for key, tensor in other.state_dict().items())


def test_everything_loads_with_an_empty_prefix_and_agrees_with_safetensors(tmp_path):
    state = small(1)
    train(state, 2)
    made = save(tmp_path / "r", state, 2)
    loaded, foreign, live = ckpt.load_tensors(made, prefix=""), load_file(shard(made)), tensors_of(state)
    assert loaded.keys() == foreign.keys() == live.keys()
    assert all(same_bits(loaded[key], foreign[key]) and same_bits(loaded[key], live[key]) for key in live)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_slices_of_several_ranks_are_put_together(tmp_path, world_size):
    made = checkpoint(run_at(tmp_path / "r"), 3, world_size=world_size)
    for key, tensor in ckpt.load_tensors(made, prefix="model.").items():
        assert same_bits(tensor, torch.from_numpy(tensors(3)[f"model.{key}"])), key


def test_only_the_chunks_that_hold_the_wanted_tensors_are_read(tmp_path):
    big = torch.randn(3 * CHUNK // 4)
    made = save(tmp_path / "r", {"model": torch.ones(5), "a": torch.zeros(9), "b": {"big": big}}, 1)
    flip(shard(made), header_length(shard(made)) + 2 * CHUNK)
    assert ckpt.load_tensors(made, prefix="model")[""].equal(torch.ones(5))
    with pytest.raises(Corrupt, match="chunk 2"):
        ckpt.load_tensors(made, prefix="b.")


def test_damage_is_an_error_and_never_a_wrong_value(tmp_path):
    made = save(tmp_path / "r", small(1), 1)
    flip(shard(made), header_length(shard(made)) + 3)
    with pytest.raises(Corrupt, match=made.attempt):
        ckpt.load_tensors(made.uri)
    shard(made).unlink()
    with pytest.raises(Corrupt, match=shard_name(0)):
        ckpt.load_tensors(made.uri)


def test_a_wrong_prefix_or_address_says_what_there_is(tmp_path):
    made = save(tmp_path / "r", small(1), 1)
    with pytest.raises(NotCommitted, match=r"modle.*model\."):
        ckpt.load_tensors(made, prefix="modle.")
    with pytest.raises(NotCommitted, match="step-"):
        ckpt.load_tensors(str(tmp_path / "r"))
    with pytest.raises(NotCommitted):
        ckpt.load_tensors(made.uri.replace("step-000000001", "step-000000009"))


def test_loading_imports_neither_the_planner_nor_a_compiler(tmp_path):
    made = save(tmp_path / "r", small(1), 1)
    script = """
import sys, ckpt
ckpt.load_tensors(sys.argv[1])
slow = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo")
print([name for name in slow if name in sys.modules])
"""
    command = [sys.executable, "-c", script, made.uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
