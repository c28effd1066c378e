"""Saves training states in the product's format without a manager, and looks at live states bit by bit."""

import hashlib
import struct

import torch
from torch import nn

from ckpt import layout, manifest, names, values
from ckpt.commit import commit
from ckpt.dcp import plan_pieces
from ckpt.flatten import flatten
from ckpt.run import open_run
from ckpt.tensor_kinds import local_part
from tests.ckpt.making import CREATED, file_facts


def shard_of(pieces):
    """A shard's bytes and layout, of what `plan_pieces` gave this rank."""
    plan = layout.plan_shard([piece.slice for piece in pieces])
    sources = {(piece.slice.key, piece.slice.offsets): piece.source for piece in pieces}
    body = [raw_bytes(sources[placed.slice.key, placed.slice.offsets]) for placed in plan.placed]
    return plan.header + b"".join(body), plan


def raw_bytes(tensor):
    plain = local_part(tensor).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def write_rank(run, attempt, state, rank=0, world_size=1, group=None):
    """One rank's shard and part, written to the attempt's folder."""
    step, launch = names.parse_attempt(attempt)
    flat = flatten(state, rank)
    pieces = plan_pieces({key: entry.tensor for key, entry in flat.tensors.items()}, group)
    data, plan = shard_of(pieces)
    run.store.make_dir(attempt)
    run.store.path(f"{attempt}/{names.shard_name(rank)}").write_bytes(data)
    stored = {n: values.encode(v, n) for n, v in flat.values.items() if rank == 0 or "/rank-" in n}
    lead = {"created": CREATED, "metrics": {}, "parent": None, "config": {}, "versions": {}}
    part = manifest.part_bytes(
        rank=rank,
        world_size=world_size,
        run_id=run.id,
        attempt=attempt,
        step=step,
        launch=launch,
        file=file_facts(names.shard_name(rank), data),
        tensors=layout.part_tensors([piece.slice for piece in pieces], plan),
        aliases=flat.aliases if rank == 0 else {},
        values=stored,
        lead={**lead, "environment": {}, "costs": {}} if rank == 0 else None,
    )
    run.store.path(f"{attempt}/{names.part_name(rank)}").write_bytes(part)


def save(path, state, step, launch=1):
    """A committed checkpoint of one rank's state in the run at `path`."""
    run = open_run(str(path))
    attempt = names.attempt_name(step, launch)
    write_rank(run, attempt, state)
    return commit(run.store, attempt, 1, 10**8, run.id, None)


def shard(checkpoint, rank=0):
    """Where a rank's shard lies."""
    return checkpoint.store.path(f"{checkpoint.attempt}/{names.shard_name(rank)}")


def small(seed=0, width=16):
    """A little training state: module with buffers, AdamW with two groups, schedule, plain value."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
    decay, rest = [model[0].weight, model[2].weight], [model[0].bias, *model[1].parameters(), model[2].bias]
    optim = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.01 * (seed + 1)
    )
    sched = torch.optim.lr_scheduler.MultiStepLR(optim, [2, 4])
    return {"model": model, "optim": optim, "sched": sched, "epoch": seed}


def train(state, steps, seed=5):
    """Some steps on data that depend on the seed alone; the losses."""
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        state["optim"].zero_grad()
        loss = state["model"](torch.randn(6, 8, generator=data)).square().mean()
        loss.backward()
        state["optim"].step()
        state["sched"].step()
        losses.append(loss.item())
    return losses


def fingerprint(state):
    """A digest of everything in a live state: tensors' bits, places in memory, and values."""
    seen = hashlib.sha256()
    flat = flatten(state)
    for key, entry in sorted(flat.tensors.items()):
        seen.update(repr((key, entry.tensor.dtype, tuple(entry.tensor.shape))).encode())
        seen.update(raw_bytes(entry.tensor))
    for name, value in sorted(flat.values.items()):
        seen.update(f"{name}={value!r}".encode())
    return seen.hexdigest()


def tensors_of(state):
    """Copies of all tensors of a live state, by stored name."""
    return {key: entry.tensor.detach().clone() for key, entry in flatten(state).tensors.items()}


def same_bits(one, two):
    """Whether two tensors have the same dtype, shape and bits."""
    return (one.dtype, one.shape) == (two.dtype, two.shape) and raw_bytes(one) == raw_bytes(two)


def header_length(path):
    """Bytes before a shard's first tensor."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
