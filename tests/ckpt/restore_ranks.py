"""What one real rank does: `python -m tests.ckpt.restore_ranks FOLDER FUNCTION...`."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ckpt import faults
from ckpt.commit import commit
from ckpt.errors import CheckpointError
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.restoring import fingerprint, tensors_of, write_rank

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Dice:
    """Per-rank random state."""

    per_rank = True

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"state": self.generator.get_state(), "seed": self.generator.initial_seed()}

    def load_state_dict(self, state):
        self.generator.set_state(state["state"])


def built(seed, shard=True):
    """A model with uneven and replicated parts and one split by columns, AdamW, and per-rank dice."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 5), nn.Linear(5, 1))
    columns = torch.arange(7 * 10 * 3, dtype=torch.float32).reshape(7, 10, 3) * (seed + 1)
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        columns = distribute_tensor(columns, mesh, [Shard(1)])
    model.register_buffer("columns", columns)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optim": optim, "dice": Dice(100 * seed + RANK), "step": seed}


def train(state, steps):
    data = torch.Generator().manual_seed(8)
    losses = []
    for _ in range(steps):
        state["optim"].zero_grad()
        loss = state["model"](torch.randn(8, 6, generator=data)).square().mean()
        loss.backward()
        state["optim"].step()
        losses.append(loss.item())
    return losses


def whole(state):
    """All tensors put together, by stored name."""
    return {
        key: t.full_tensor() if hasattr(t, "full_tensor") else t
        for key, t in tensors_of(state).items()
        if "/rank-" not in key
    }


def save(folder, state, step):
    run = open_run(str(folder / "run"))
    attempt = f"step-{step:09d}-00001-abcd1234"
    write_rank(run, attempt, state, RANK, WORLD, dist.group.WORLD)
    dist.barrier()
    if RANK == 0:
        commit(run.store, attempt, WORLD, 10**8, run.id, None)
    dist.barrier()


def train_and_save(folder):
    state = built(1)
    train(state, 2)
    save(folder, state, 2)
    train(state, 1)
    save(folder, state, 3)
    torch.save(whole(state), folder / f"saved-{RANK}.pt")
    note(folder, "train_and_save", dice=state["dice"].generator.get_state().tolist(), losses=train(state, 4))


def restore_and_train(folder):
    state = built(2)
    fresh = Dice(200 + RANK).generator.get_state()
    said = []
    run = open_run(str(folder / "run"))
    found = restore_into(run, state, RANK, dist.group.WORLD, say=said.append)
    torch.save(whole(state), folder / f"restored-{WORLD}-{RANK}.pt")
    dice = state["dice"].generator.get_state()
    note(
        folder,
        "restore_and_train",
        step=found.step,
        said=said,
        dice=dice.tolist(),
        untouched=dice.equal(fresh),
        value=state["step"],
        losses=train(state, 4),
    )


def restore_with_trouble(folder):
    """Rank 1 can't read its part of the newest; then another run; then states that differ."""
    state, said, result = built(2), [], {}
    train(state, 1)
    run = open_run(str(folder / "run"))
    if RANK == 1:
        rule = [{"match": "trainer:read:step-000000003.*safetensors", "do": "raise", "errno": 116}]
        faults._rules = faults.parse(json.dumps(rule))
    result["step"] = restore_into(run, state, RANK, dist.group.WORLD, say=said.append).step
    result["said"] = said
    state = built(2)
    other = open_run(str(folder / f"other-{RANK}"))
    result["runs"] = failure(lambda: restore_into(other, state, RANK, dist.group.WORLD))
    state["model"].register_buffer("extra" if RANK else "columns2", torch.zeros(1))
    before = fingerprint(state)
    result["differs"] = failure(lambda: restore_into(run, state, RANK, dist.group.WORLD, which="step:2"))
    result["untouched"] = fingerprint(state) == before
    note(folder, "restore_with_trouble", **result)


def failure(work):
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def note(folder, name, **facts):
    (folder / f"{name}-{WORLD}-{RANK}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{here}/meeting-{WORLD}",
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for function in sys.argv[2:]:
        globals()[function](here)
    dist.barrier()
    dist.destroy_process_group()
