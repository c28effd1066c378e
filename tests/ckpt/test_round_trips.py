"""What goes in at a save comes out of a restore, through the manager and real files."""

import datetime as dt
import enum
import math
import pathlib
import random

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.policies import EverySteps
from tests.ckpt.managing import Toy, copy_of, manager, same


def restored(tmp_path, saved, fresh):
    first = manager(tmp_path, saved)
    first.save(1, wait=True)
    first.close()
    second = manager(tmp_path, fresh)
    assert second.restore().step == 1
    second.close(save=False)
    return fresh


def odd_tensors():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    kinds = {
        "scalar": torch.tensor(3.5),
        "one": torch.ones(1),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bf16": torch.randn(7).bfloat16(),
        "half": torch.randn(7).half(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "fp8_scale": torch.ones(5).to(torch.float8_e8m0fnu),
        "complex64": z.clone(),
        "complex128": torch.randn(3, dtype=torch.complex128),
        "conj": z.conj(),
        "neg": z.conj().imag,
        "int64": torch.tensor([2**40, -1]),
        "uint64": torch.tensor([2**63 + 1], dtype=torch.uint64),
        "float64": torch.tensor([math.pi], dtype=torch.float64),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "one_row": base[2],
    }
    return {f"t_{name}": tensor for name, tensor in kinds.items()}


def as_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("as_parameters", [False, True])
def test_every_ordinary_kind_of_tensor_comes_back_equal(tmp_path, as_parameters):
    tensors = odd_tensors()
    if as_parameters:
        saved, fresh = nn.Module(), nn.Module()
        for name, tensor in tensors.items():
            saved.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            blank = torch.zeros(tensor.shape, dtype=torch.float32).to(tensor.dtype)
            fresh.register_parameter(name, nn.Parameter(blank, requires_grad=False))
        restored(tmp_path, {"m": saved}, {"m": fresh})
        found = dict(fresh.named_parameters())
    else:
        found = restored(tmp_path, {"t": tensors}, {"t": {}})["t"]
    loaded = ckpt.load_tensors(
        ckpt.latest_valid(str(tmp_path / "run")), prefix="m." if as_parameters else "t."
    )
    for name, tensor in tensors.items():
        assert as_bytes(found[name]) == as_bytes(tensor), name
        assert as_bytes(loaded[name]) == as_bytes(tensor), name


class Color(enum.Enum):
    RED = "red"


def test_a_loop_that_holds_its_plain_values_itself_sees_them_restored(tmp_path):
    def made(step):
        return {"progress": {"step": step, "seen": [step]}, "losses": [1.0] * step, "names": {str(step)}}

    fresh = made(0)
    held = [fresh["progress"], fresh["losses"], fresh["names"]]
    restored(tmp_path, made(3), fresh)
    assert held == [{"step": 3, "seen": [3]}, [1.0] * 3, {"3"}]
    assert [fresh["progress"], fresh["losses"], fresh["names"]] == held


def test_plain_values_of_all_kinds_come_back(tmp_path):
    values = {
        "int": 3,
        "huge": 2**70,
        "float": 0.1,
        "nan": math.nan,
        "str": "ä\n",
        "none": None,
        "list": [1, [2, {"deep": (3, 4)}]],
        3: "int key",
        (1, "a"): "tuple key",
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "path": pathlib.PurePosixPath("/a b"),
        "when": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "big": {str(i): "x" * 1000 for i in range(5000)},
        "python_rng": random.getstate(),
    }
    state = {"values": values, "scalar": {"f": np.float64(0.5), "e": Color.RED}, "epoch": 7}
    found = restored(tmp_path, state, {"values": {}, "scalar": {}, "epoch": 0})
    back = found["values"]
    assert math.isnan(back.pop("nan")) and values.pop("nan")
    assert np.array_equal(back.pop("array"), values.pop("array"))
    assert back == values
    assert isinstance(back["list"][1][1]["deep"], tuple)
    assert found["scalar"] == {"f": 0.5, "e": "red"} and found["epoch"] == 7


def test_numpy_and_torch_random_states_go_on_where_they_were(tmp_path):
    class Rng:
        def state_dict(self):
            return {
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
            }

        def load_state_dict(self, state):
            np.random.set_state(state["numpy"])
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])

    first = manager(tmp_path, {"rng": Rng()})
    first.save(1, wait=True)
    expected = (np.random.rand(), torch.rand(1).item(), random.random())
    first.close()
    second = manager(tmp_path, {"rng": Rng()})
    second.restore()
    second.close(save=False)
    assert (np.random.rand(), torch.rand(1).item(), random.random()) == expected


@pytest.mark.parametrize("saved_as", ["plain", "compiled"])
@pytest.mark.parametrize("loaded_as", ["plain", "compiled", "inside"])
def test_wrapped_and_plain_models_load_each_other(tmp_path, saved_as, loaded_as):
    def wrap(model, how):
        if how == "inside":
            return nn.Sequential(torch.compile(model[0]), model[1])
        return torch.compile(model) if how == "compiled" else model

    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    target = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    restored(tmp_path, {"model": wrap(source, saved_as)}, {"model": wrap(target, loaded_as)})
    x = torch.randn(5, 3)
    assert torch.equal(source(x), target(x))
    names = ckpt.latest_valid(str(tmp_path / "run")).manifest.tensors
    assert sorted(names) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]


def test_a_compiled_optimizer_step_waits_for_the_copy_as_well(tmp_path):
    toy = Toy()
    compiled = torch.compile(toy.optim.step, backend="eager")
    m = manager(tmp_path, toy.state, save=EverySteps(1), when_busy="wait", keep=ckpt.KeepLast(-1))
    expected = {}
    for step in range(1, 4):
        toy.optim.zero_grad()
        toy.model(torch.randn(16, 8)).square().mean().backward()
        compiled()
        expected[step] = copy_of(toy.state)
        m.step(step)
    m.close()
    assert m.stats.voided == 0
    for checkpoint in ckpt.checkpoints(str(tmp_path / "run")):
        assert same(ckpt.load_tensors(checkpoint, prefix=""), expected[checkpoint.step])


def test_a_scaler_comes_back_as_it_was(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7})
    fresh = torch.amp.GradScaler("cpu")
    restored(tmp_path, {"scaler": scaler}, {"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.state_dict()["_growth_tracker"] == 7
