"""Checkpoints of several ranks, restored on as many, on fewer and on more; and ranks that fail together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.restoring import fingerprint, same_bits, save, tensors_of

ROOT = Path(__file__).parents[2]


def launch(folder, world_size, *functions):
    """Run functions of `restore_ranks` on real ranks; what each of them noted, by function."""
    ranks = []
    for rank in range(world_size):
        own = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        command = [sys.executable, "-m", "tests.ckpt.restore_ranks", str(folder), *functions]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True))
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)
    return {
        name: [
            json.loads((folder / f"{name}-{world_size}-{rank}.json").read_text())
            for rank in range(world_size)
        ]
        for name in functions
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run saved and restored by two ranks with FSDP2: its folder, whole tensors, what was noted."""
    folder = tmp_path_factory.mktemp("ranks")
    noted = launch(folder, 2, "train_and_save", "restore_and_train", "restore_with_trouble")
    return folder, torch.load(folder / "saved-0.pt"), noted


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_ranks_state_comes_back_whole_on_as_many_ranks_and_on_more(saved, world_size):
    folder, tensors, noted = saved
    before, again = (
        noted["train_and_save"],
        noted if world_size == 2 else launch(folder, 3, "restore_and_train"),
    )
    for rank, facts in enumerate(again["restore_and_train"]):
        restored = torch.load(folder / f"restored-{world_size}-{rank}.pt")
        assert restored.keys() == tensors.keys()
        assert [key for key in tensors if not same_bits(restored[key], tensors[key])] == []
        assert facts["step"] == 3
        assert facts["value"] == 1
        assert facts["losses"] == pytest.approx(before[0]["losses"], abs=1e-6)
        if world_size == 2:
            assert facts["losses"] == before[rank]["losses"]
        if rank < 2:
            assert facts["dice"] == before[rank]["dice"]
        else:
            assert facts["untouched"]
        told = world_size == 3 and rank == 0
        assert any("rank 2 starts as it was built" in line for line in facts["said"]) == told


def test_two_ranks_state_comes_back_whole_in_one_process_without_a_group(saved, monkeypatch):
    folder, tensors, noted = saved
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    from tests.ckpt import restore_ranks

    state = restore_ranks.built(2, shard=False)
    said = []
    restore_into(open_run(str(folder / "run")), state, say=said.append)
    restored = tensors_of(state)
    assert [key for key in tensors if not same_bits(restored[key], tensors[key])] == []
    assert state["dice"].generator.get_state().tolist() == noted["train_and_save"][0]["dice"]
    assert any("ranks 1 to 1 is left unused" in line for line in said)
    assert restore_ranks.train(state, 4) == pytest.approx(noted["train_and_save"][0]["losses"], abs=1e-6)


def test_sharded_tensors_load_whole_without_a_process_group(saved):
    folder, tensors, _ = saved
    newest = ckpt.checkpoints(str(folder / "run"))[0]
    loaded = ckpt.load_tensors(newest)
    meant = {key.removeprefix("model."): t for key, t in tensors.items() if key.startswith("model.")}
    assert loaded.keys() == meant.keys()
    assert all(same_bits(loaded[key], meant[key]) for key in meant)
    files = newest.manifest.files
    assert len(files) == 2
    slices = newest.manifest.tensors["model.columns"].slices
    assert {item.shape for item in slices} == {(7, 5, 3)}


def test_what_fails_on_one_rank_fails_on_all(saved):
    first, second = saved[2]["restore_with_trouble"]
    assert first["step"] == second["step"] == 2
    assert any("rank 1" in line and "step-000000003" in line for line in first["said"])
    assert second["said"] == []
    assert "different runs" in first["runs"]
    assert "different runs" in second["runs"]
    assert "StateError" in first["differs"]
    assert first["differs"] == second["differs"]
    assert "model.extra" in first["differs"]
    assert "model.columns2" in first["differs"]
    assert first["untouched"]
    assert second["untouched"]


@pytest.fixture
def lone_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPINGS = {
    "plain": lambda m: m,
    "compiled": torch.compile,
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda m: torch.compile(DistributedDataParallel(m)),
    "ddp of compiled": lambda m: DistributedDataParallel(torch.compile(m)),
}


def wrapped(kind, seed):
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    inner = torch.compile(block) if "compiled" in kind else block
    model = WRAPPINGS[kind](nn.Sequential(inner, nn.Linear(4, 1)))
    optim = torch.optim.Adam(model.parameters(), 0.1)
    for n, p in enumerate(model.parameters()):
        moments = {"exp_avg": torch.full_like(p, seed + n), "exp_avg_sq": torch.full_like(p, 1.0)}
        optim.state[p] = {"step": torch.tensor(float(seed)), **moments}
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("saved_as", WRAPPINGS)
def test_wrappers_leave_no_trace_in_names_and_all_load_each_other(tmp_path, lone_group, saved_as):
    state = wrapped(saved_as, 1)
    made = save(tmp_path / "run", state, 1)
    assert not any("module" in key or "_orig_mod" in key for key in made.manifest.tensors)
    for loaded_as in WRAPPINGS:
        other = wrapped(loaded_as, 2)
        for optim_state in (other["optim"].state, {}):
            other["optim"].state.clear()
            other["optim"].state.update(optim_state)
            restore_into(open_run(str(tmp_path / "run")), other)
            assert fingerprint(other) == fingerprint(state), loaded_as
    plain = wrapped("plain", 2)["model"]
    plain.load_state_dict(ckpt.load_tensors(made))
    inputs = torch.randn(5, 3)
    original = wrapped("plain", 1)["model"]
    assert plain.eval()(inputs).equal(original.eval()(inputs))
