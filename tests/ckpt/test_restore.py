"""Restoring into a live state: all of it or none of it, to the bit."""

import dataclasses
import datetime as dt
import enum
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import faults
from ckpt.digest import CHUNK, file_digest
from ckpt.errors import Corrupt, NewerFormat, NotCommitted, StateError
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.making import flip, resealed, tree_digest
from tests.ckpt.restoring import (
    fingerprint,
    header_length,
    raw_bytes,
    same_bits,
    save,
    shard,
    small,
    tensors_of,
    train,
)


def restore(path, state, **options):
    return restore_into(open_run(str(path), create=False), state, **options)


class Box:
    """An object that saves and restores whatever it holds."""

    def __init__(self, held=None):
        self.held = held

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    gold, stopped = small(1), small(1)
    train(gold, 3)
    train(stopped, 3)
    save(tmp_path / "r", stopped, 3)
    resumed = small(2)
    found = restore(tmp_path / "r", resumed)
    assert found.step == 3
    assert resumed["epoch"] == 1
    assert train(resumed, 4, seed=9) == train(gold, 4, seed=9)
    assert fingerprint(resumed) == fingerprint(gold)


def test_tensors_keep_their_identity_and_memory(tmp_path):
    save(tmp_path / "r", small(1), 1)
    state = small(2)
    before = {n: (id(p), p.data_ptr()) for n, p in state["model"].state_dict(keep_vars=True).items()}
    restore(tmp_path / "r", state)
    assert before == {n: (id(p), p.data_ptr()) for n, p in state["model"].state_dict(keep_vars=True).items()}


def test_an_empty_run_gives_nothing_and_changes_nothing(tmp_path):
    run = open_run(str(tmp_path / "r"))
    run.store.make_dir("step-000000001-00001-deadbeef")
    state = small(2)
    before = fingerprint(state)
    assert restore_into(run, state) is None
    assert fingerprint(state) == before


def test_a_partial_checkpoint_is_passed_over_by_name_for_the_newest_whole_one(tmp_path):
    whole, newer = small(1), small(3)
    save(tmp_path / "r", whole, 5)
    bad = save(tmp_path / "r", newer, 10)
    shard(bad).unlink()
    uncommitted = save(tmp_path / "r", newer, 15)
    uncommitted.store.path(f"{uncommitted.attempt}/manifest.json").unlink()
    kept = tree_digest(tmp_path / "r")
    said, skipped, state = [], [], small(2)
    found = restore(
        tmp_path / "r", state, say=said.append, on_skip=lambda c, why: skipped.append((c.step, why))
    )
    assert found.step == 5
    assert fingerprint(state) == fingerprint(whole)
    assert [step for step, _ in skipped] == [10]
    assert any(bad.attempt in line and "missing" in line for line in said)
    assert tree_digest(tmp_path / "r") == kept


def damage(checkpoint, how):
    path = shard(checkpoint)
    folder = path.parent
    if how == "flipped byte":
        flip(path, header_length(path) + 17)
    elif how == "cut shard":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "missing shard":
        path.unlink()
    elif how == "flipped byte in the manifest":
        flip(folder / "manifest.json", 200)
    elif how == "manifest of another run":
        (folder / "manifest.json").write_bytes(b"{}")
    elif how in FORGERIES:
        manifest = folder / "manifest.json"
        manifest.write_bytes(resealed(manifest.read_bytes(), FORGERIES[how]))
    elif how == "shard is a folder":
        path.unlink()
        path.mkdir()


def forge_range(body):
    body["tensors"]["model.0.weight"]["slices"][0].update(start=1 << 40, end=(1 << 40) + 512)


def forge_overlap(body):
    [whole] = body["tensors"]["model.0.weight"]["slices"]
    body["tensors"]["model.0.weight"]["slices"] = [whole, whole]


def forge_gap(body):
    [whole] = body["tensors"]["model.0.weight"]["slices"]
    whole["shape"][0] -= 1
    whole["end"] -= 32


def forge_name(body):
    body["files"][0]["name"] = "../../secret.safetensors"


def forge_digest(body):
    body["files"][0]["chunks"][0] = "0" * 32
    body["files"][0]["digest"] = file_digest("xxh3-128", body["files"][0]["chunks"])


def forge_reference(body):
    body["values"]["epoch"] = {"$tensor": "model.nowhere"}


FORGERIES = {
    "range outside the file": forge_range,
    "slices that overlap": forge_overlap,
    "slices that leave a gap": forge_gap,
    "name outside the folder": forge_name,
    "another digest": forge_digest,
    "reference to nothing": forge_reference,
}
DAMAGES = [
    *FORGERIES,
    "flipped byte",
    "cut shard",
    "missing shard",
    "flipped byte in the manifest",
    "manifest of another run",
    "shard is a folder",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_the_older_one_restored(tmp_path, how):
    older = small(1)
    save(tmp_path / "r", older, 5)
    damage(save(tmp_path / "r", small(3), 10), how)
    state, said = small(2), []
    assert restore(tmp_path / "r", state, say=said.append).step == 5
    assert fingerprint(state) == fingerprint(older)
    assert len(said) == 1
    assert "step-000000010" in said[0]


@pytest.mark.parametrize("how", DAMAGES)
def test_only_damaged_checkpoints_are_an_error_that_names_each_and_leaves_the_state(tmp_path, how):
    made = [save(tmp_path / "r", small(n), n) for n in (1, 3)]
    for checkpoint in made:
        damage(checkpoint, how)
    kept = tree_digest(tmp_path / "r")
    state = small(2)
    train(state, 2)
    before = fingerprint(state)
    with pytest.raises(Corrupt) as failed:
        restore(tmp_path / "r", state)
    assert all(checkpoint.attempt in str(failed.value) for checkpoint in made)
    assert fingerprint(state) == before
    assert tree_digest(tmp_path / "r") == kept


def test_storage_that_fails_in_the_middle_leaves_the_state(tmp_path, monkeypatch):
    save(tmp_path / "r", small(1), 1)
    state = small(2)
    train(state, 1)
    before = fingerprint(state)
    rule = '[{"match": "trainer:read:step-.*safetensors", "do": "raise", "errno": 5}]'
    monkeypatch.setattr(faults, "_rules", faults.parse(rule))
    with pytest.raises(Corrupt, match=r"step-000000001.*Input/output"):
        restore(tmp_path / "r", state)
    assert fingerprint(state) == before


def test_a_checkpoint_asked_for_by_name_is_taken_or_refused_but_never_replaced(tmp_path):
    wanted = small(1)
    first = save(tmp_path / "r", wanted, 5)
    save(tmp_path / "r", small(3), 10)
    for which in ("step:5", first.attempt, first.uri):
        state = small(2)
        assert restore(tmp_path / "r", state, which=which).step == 5
        assert fingerprint(state) == fingerprint(wanted)
    flip(shard(first), -1)
    state = small(2)
    before = fingerprint(state)
    with pytest.raises(Corrupt, match=first.attempt):
        restore(tmp_path / "r", state, which="step:5")
    with pytest.raises(NotCommitted, match="7"):
        restore(tmp_path / "r", state, which="step:7")
    (shard(first).parent / "manifest.json").unlink()
    with pytest.raises(NotCommitted, match=first.attempt):
        restore(tmp_path / "r", state, which=first.uri)
    assert fingerprint(state) == before


def test_a_fresh_start_is_refused_where_there_are_checkpoints(tmp_path):
    open_run(str(tmp_path / "r"))
    assert restore(tmp_path / "r", small(1), which="fresh") is None
    save(tmp_path / "r", small(1), 5)
    with pytest.raises(StateError, match="step-000000005"):
        restore(tmp_path / "r", small(1), which="fresh")


def test_a_newer_format_is_an_error_and_not_passed_over(tmp_path, monkeypatch):
    save(tmp_path / "r", small(1), 5)
    monkeypatch.setattr("ckpt.manifest.FORMAT", 2)
    save(tmp_path / "r", small(3), 10)
    monkeypatch.undo()
    with pytest.raises(NewerFormat):
        restore(tmp_path / "r", small(2))


def test_another_run_is_a_source_that_is_only_read(tmp_path):
    source = small(1)
    made = save(tmp_path / "a", source, 7)
    kept = tree_digest(tmp_path / "a")
    paths = [*(tmp_path / "a").rglob("*"), tmp_path / "a"]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for which in (str(tmp_path / "a"), made.uri):
            open_run(str(tmp_path / "b"))
            state = small(2)
            assert restore(tmp_path / "b", state, which=which).run_uri == str(tmp_path / "a")
            assert fingerprint(state) == fingerprint(source)
    finally:
        for path in paths:
            path.chmod(0o755)
    assert tree_digest(tmp_path / "a") == kept
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["run.json"]


ODD = {
    "scalar": lambda: torch.tensor(3.5),
    "one": lambda: torch.tensor([7]),
    "none": lambda: torch.zeros(0, 3),
    "bool": lambda: torch.tensor([True, False, True]),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
    "bf16": lambda: torch.randn(3, 5).bfloat16(),
    "fp16": lambda: torch.randn(3).half(),
    "f8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
    "f8scale": lambda: torch.tensor([1, 2, 130], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "f4": lambda: torch.tensor([1, 250], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "c64": lambda: torch.randn(4, dtype=torch.complex64),
    "c128": lambda: torch.randn(2, 2, dtype=torch.complex128),
    "c32": lambda: torch.tensor([1.5, 2, 3, -4], dtype=torch.float16).view(torch.complex32),
    "big": lambda: torch.tensor([2**40, -(2**62)]),
    "uint64": lambda: torch.tensor([2**63 + 5, 1], dtype=torch.uint64),
    "f64": lambda: torch.tensor([1e-310, float("nan"), float("-inf")], dtype=torch.float64),
    "transposed": lambda: torch.randn(3, 5).t(),
    "strided": lambda: torch.arange(20.0)[::3],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
}


def blank(tensor):
    """Another tensor of zeroed bytes, with the same dtype, shape and strides."""
    memory = torch.UntypedStorage(tensor.untyped_storage().nbytes()).fill_(0)
    return torch.empty(0, dtype=tensor.dtype).set_(memory, 0, tensor.size(), tensor.stride())


@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_tensor_comes_back_equal_wherever_it_is_kept(tmp_path, kind):
    torch.manual_seed(3)
    made = ODD[kind]()
    meant = made.resolve_conj().resolve_neg()
    module = nn.Module()
    module.register_buffer("t", made)
    save(
        tmp_path / "r",
        {"m": module, "box": Box([made, {"in": made}]), "plain": {"t": made}, "alone": made},
        1,
    )
    other = nn.Module()
    other.register_buffer("t", blank(made))
    state = {"m": other, "box": Box(), "plain": None, "alone": blank(made)}
    held = state["alone"]
    restore(tmp_path / "r", state)
    found = [other.t, state["box"].held[0], state["box"].held[1]["in"], state["plain"]["t"], held]
    assert all(same_bits(tensor.resolve_conj().resolve_neg(), meant) for tensor in found)


def test_a_small_view_of_a_big_tensor_costs_what_the_view_holds(tmp_path):
    big = torch.randn(10_000_000)
    view = big[:10]
    made = save(tmp_path / "r", {"t": view, "in": [view, {"deep": view}]}, 1)
    assert sum(path.stat().st_size for path in shard(made).parent.iterdir()) < 1_000_000
    state = {"t": torch.zeros(10), "in": None}
    restore(tmp_path / "r", state)
    assert state["t"].equal(view)
    assert state["in"][1]["deep"].untyped_storage().nbytes() < 1_000


class Color(enum.Enum):
    RED = 3


@dataclasses.dataclass
class Config:
    lr: float
    layers: list


def test_numpy_paths_dates_enums_sets_and_configs_are_plain_after_a_resume_in_a_new_process(tmp_path):
    np.random.seed(4)
    held = {
        "scalar": np.float64(2.5),
        "rng": np.random.get_state(),
        "path": pathlib.Path("/a/b c"),
        "when": dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC),
        "color": Color.RED,
        "set": {3, 1},
        "config": Config(0.1, [1, 2]),
    }
    save(tmp_path / "r", {"box": Box(held)}, 1)
    script = """
import sys, numpy as np
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.test_restore import Box
box = Box()
restore_into(open_run(sys.argv[1]), {"box": box})
held = box.held
np.random.set_state(held.pop("rng"))
print(np.random.randint(10**9), held)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "r")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    number, _, rest = done.stdout.partition(" ")
    np.random.seed(4)
    assert int(number) == np.random.randint(10**9)
    assert "2.5" in rest
    assert "Path('/a/b c')" in rest
    assert "'color': 3" in rest
    assert "'config': {'lr': 0.1, 'layers': [1, 2]}" in rest


def test_python_values_come_back_equal_and_of_the_same_types(tmp_path):
    values = {
        "int": 7,
        "float": 0.1,
        "nan": float("inf"),
        "str": "naïve\u2028",
        "none": None,
        "list": [1, (2, [3])],
        "big": 2**70,
        "nested": {"a": {1: "one", None: 2, (3, 4): b"\x00\xff"}},
        "long": {f"key {n}": "x" * 1_000 for n in range(5_000)},
    }
    save(tmp_path / "r", {"box": Box(values), **values}, 1)
    state = {"box": Box(), **dict.fromkeys(values)}
    restore(tmp_path / "r", state)
    box = state.pop("box")
    assert state == values
    assert box.held == values
    assert type(state["list"][1]) is tuple


def test_what_a_module_keeps_outside_its_tensors_comes_back(tmp_path):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "mean": torch.full((2,), float(self.seen))}

        def set_extra_state(self, state):
            self.seen, self.mean = state["seen"], state["mean"]

    first, second = nn.Sequential(Counting(), Counting()), nn.Sequential(Counting(), Counting())
    first[0].seen, first[1].seen = 3, 4
    save(tmp_path / "r", {"model": first}, 1)
    restore(tmp_path / "r", {"model": second})
    assert (second[0].seen, second[1].seen) == (3, 4)
    assert second[1].mean.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("saved", "loaded", "expected"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "missing",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "unexpected",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)),
            "shape",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()),
            "dtype",
        ),
    ],
)
def test_a_changed_model_is_refused_with_all_differences_and_restored_in_part_only_when_asked(
    tmp_path, saved, loaded, expected
):
    torch.manual_seed(1)
    first = saved()
    save(tmp_path / "r", {"model": first}, 1)
    state = {"model": loaded()}
    before = fingerprint(state)
    with pytest.raises(StateError) as failed:
        restore(tmp_path / "r", state)
    text = str(failed.value)
    assert expected in text
    assert "model.1.weight" in text
    assert "model.1.bias" in text
    assert "model.0" not in text
    assert fingerprint(state) == before
    said = []
    old = tensors_of(state)
    assert restore(tmp_path / "r", state, partial=True, say=said.append).step == 1
    assert len(said) == 1
    assert "model.1.weight" in said[0]
    new = tensors_of(state)
    assert same_bits(new["model.0.weight"], first[0].weight.detach())
    assert all(same_bits(new[key], old[key]) for key in new if key.startswith("model.1."))


def test_a_renamed_layer_is_both_missing_and_unexpected(tmp_path):
    save(tmp_path / "r", {"model": nn.ModuleDict({"old": nn.Linear(2, 2)})}, 1)
    with pytest.raises(StateError) as failed:
        restore(tmp_path / "r", {"model": nn.ModuleDict({"new": nn.Linear(2, 2)})})
    missing, unexpected = str(failed.value).split("unexpected")
    assert "model.new.weight" in missing
    assert "model.old.bias" in unexpected


def test_entries_that_only_one_side_has_are_listed(tmp_path):
    save(tmp_path / "r", {"a": 1, "gone": Box(3), "model": nn.Linear(2, 2)}, 1)
    state = {"a": 0, "added": Box(5), "other": nn.Linear(2, 2)}
    with pytest.raises(StateError) as failed:
        restore(tmp_path / "r", state)
    missing, unexpected = str(failed.value).split("unexpected")
    assert all(name in missing for name in ("added", "other.weight", "other.bias"))
    assert all(name in unexpected for name in ("gone", "model.weight", "model.bias"))
    assert state["a"] == 0
    restore(tmp_path / "r", state, partial=True)
    assert (state["a"], state["added"].held) == (1, 5)


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("saved_tied", [True, False])
def test_tied_weights_load_untied_and_the_other_way_round(tmp_path, saved_tied):
    first = Tied(saved_tied)
    with torch.no_grad():
        first.head.weight.copy_(first.embed.weight)
    made = save(tmp_path / "r", {"model": first}, 1)
    assert shard(made).stat().st_size < 4096 + (1 if saved_tied else 2) * 81
    second = Tied(not saved_tied)
    restore(tmp_path / "r", {"model": second})
    assert second.head.weight.equal(first.embed.weight)
    assert second.embed.weight.equal(first.embed.weight)
    assert (second.head.weight is second.embed.weight) == (not saved_tied)


def test_weights_that_had_different_values_are_not_tied_in_silence(tmp_path):
    save(tmp_path / "r", {"model": Tied(False)}, 1)
    state = {"model": Tied(True)}
    before = fingerprint(state)
    with pytest.raises(StateError, match=r"model\.head\.weight.*tied"):
        restore(tmp_path / "r", state)
    assert fingerprint(state) == before


def test_an_object_that_refuses_its_state_is_named_and_the_tensors_stay(tmp_path):
    class Refusing(Box):
        def load_state_dict(self, state):
            raise KeyError("scale")

    save(tmp_path / "r", {"model": nn.Linear(2, 2), "scaler": Box(1)}, 1)
    state = {"model": nn.Linear(2, 2), "scaler": Refusing()}
    before = raw_bytes(state["model"].weight)
    with pytest.raises(StateError, match=r"scaler.*KeyError.*scale"):
        restore(tmp_path / "r", state)
    assert raw_bytes(state["model"].weight) == before


def test_a_signing_key_refuses_unsigned_checkpoints(tmp_path, monkeypatch):
    save(tmp_path / "r", small(1), 1)
    monkeypatch.setenv("CKPT_SIGNING_KEY", "secret")
    state = small(2)
    before = fingerprint(state)
    with pytest.raises(Corrupt, match="sign"):
        restore(tmp_path / "r", state)
    assert fingerprint(state) == before


def test_landing_memory_is_as_big_as_what_is_live_and_is_given_back(tmp_path):
    live, slots = 64 << 20, 128 << 20
    model = nn.utils.skip_init(nn.Linear, 4096, live // 4 // 4096, bias=False)
    optim = torch.optim.Adam(model.parameters(), 0.1)
    [p] = model.parameters()
    optim.state[p] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.ones_like(p),
        "exp_avg_sq": torch.ones_like(p),
    }
    save(tmp_path / "r", {"model": model, "optim": optim}, 1)
    script = """
import sys, torch
from torch import nn
from ckpt.restore import restore_into
from ckpt.run import open_run

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

model = nn.utils.skip_init(nn.Linear, 4096, int(sys.argv[2]), bias=False)
nn.init.zeros_(model.weight)
state = {"model": model, "optim": torch.optim.Adam(model.parameters(), 0.1)}
run = open_run(sys.argv[1])
torch.empty(0), __import__("numpy"), __import__("xxhash"), __import__("ckpt.restore_match")
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmRSS")
restore_into(run, state, threads=2)
print((kilobytes("VmHWM") - before) * 1024, (kilobytes("VmRSS") - before) * 1024)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "r"), str(live // 4 // 4096)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, after = map(int, done.stdout.split())
    assert slots < peak < live + slots + 2 * CHUNK + (16 << 20)
    assert after < slots + (16 << 20)
