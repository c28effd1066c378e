"""Makes runs, launches and checkpoints on storage by the product's own parts, without torch or a training."""

import json

import numpy as np

from ckpt import layout, manifest, names, values
from ckpt.commit import commit
from ckpt.digest import CHUNK, DEFAULT, chunk_digest, file_digest
from ckpt.names import launch_file
from ckpt.run import open_run
from ckpt.sealed import canonical, signing_key

CREATED = "2026-01-02T03:04:05+00:00"


def tensors(seed=0, rows=8):
    """A little state: float32, int64 and bool arrays, one of them 0-dimensional, one empty."""
    rng = np.random.default_rng(seed)
    return {
        "model.weight": rng.standard_normal((rows, 3)).astype(np.float32),
        "model.count": np.array(seed, dtype=np.int64),
        "model.mask": rng.integers(0, 2, rows).astype(np.bool_),
        "model.none": np.zeros((0, 3), dtype=np.float32),
    }


def file_facts(name, data, kind=DEFAULT):
    chunks = [chunk_digest(kind, data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    digest = file_digest(kind, chunks)
    return {"name": name, "size": len(data), "digest_kind": kind, "digest": digest, "chunks": chunks}


def slices_of(state, rank, world_size):
    """What a rank holds: its rows of what has as many rows as ranks; rank 0 also holds the rest."""
    for key, array in state.items():
        if array.ndim and array.shape[0] >= world_size > 1:
            bounds = [array.shape[0] * r // world_size for r in range(world_size + 1)]
            low, high = bounds[rank], bounds[rank + 1]
            offsets = (low, *(0 for _ in array.shape[1:]))
            yield (
                layout.Slice(key, str(array.dtype), array.shape, offsets, (high - low, *array.shape[1:])),
                array[low:high],
            )
        elif rank == 0:
            yield layout.Slice(key, str(array.dtype), array.shape, (0,) * array.ndim, array.shape), array


def part_fields(run, attempt, state, *, rank=0, world_size=1, metrics=None, plain=None, kind=DEFAULT, **lead):
    """(the shard's bytes, the fields of the rank's part)"""
    step, launch = names.parse_attempt(attempt)
    held = list(slices_of(state, rank, world_size))
    plan = layout.plan_shard([item for item, _ in held])
    by_key = {(item.key, item.offsets): array for item, array in held}
    arrays = [by_key[placed.slice.key, placed.slice.offsets] for placed in plan.placed]
    data = plan.header + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    fields = {
        "rank": rank,
        "world_size": world_size,
        "run_id": run.id,
        "attempt": attempt,
        "step": step,
        "launch": launch,
        "file": file_facts(names.shard_name(rank), data, kind),
        "tensors": layout.part_tensors([item for item, _ in held], plan),
        "aliases": {},
        "values": {f"rng/rank-{rank:05d}": values.encode({"seed": rank})},
        "lead": None,
    }
    if rank == 0:
        fields["values"]["progress"] = values.encode(plain if plain is not None else {"step": step})
        fields["lead"] = {
            "created": CREATED,
            "metrics": metrics or {},
            "parent": None,
            "config": {"lr": 0.1},
            "versions": {"numpy": "2"},
            "environment": {"threads": 1},
            "costs": {"stall_s": 0.001},
            **lead,
        }
    return data, fields


def write_attempt(run, step, launch=1, *, world_size=1, attempt=None, state=None, parts=True, **more):
    """An attempt that is complete but for its manifest; its name. `parts=False` leaves the parts out too."""
    attempt = attempt or names.attempt_name(step, launch)
    run.store.make_dir(attempt)
    for rank in range(world_size):
        data, fields = part_fields(
            run, attempt, state or tensors(step), rank=rank, world_size=world_size, **more
        )
        run.store.put(f"{attempt}/{names.shard_name(rank)}", data, durable=False)
        if parts:
            part = manifest.part_bytes(signing_key=signing_key(), **fields)
            run.store.put(f"{attempt}/{names.part_name(rank)}", part, durable=False)
    return attempt


def checkpoint(run, step, launch=1, *, world_size=1, **more):
    """A committed checkpoint."""
    attempt = write_attempt(run, step, launch, world_size=world_size, **more)
    return commit(run.store, attempt, world_size, 10**8, run.id, signing_key())


def launch(run, number, parent=None, outcome="finished", fresh=False, **info):
    """A launch as its files tell: ended (None: not recorded), gone on from a checkpoint, or fresh."""
    run.store.make_dir(names.LAUNCHES)
    gone = {"host": "elsewhere", "boot": "0", "pid_ns": "0", "pid": 1, "pid_start": 1, "number": number}
    run.store.create(launch_file(number), canonical({**gone, **info}))
    if parent is not None or fresh:
        record = (
            {"fresh": True}
            if fresh
            else {"attempt": parent.attempt, "step": parent.step, "launch": parent.launch}
        )
        run.store.create(launch_file(number, "parent.json"), canonical(record))
    if outcome is not None:
        run.store.create(launch_file(number, "end.json"), canonical({"outcome": outcome, "last_step": None}))


def run_at(path, **more):
    return open_run(str(path), **more)


def tree_digest(folder):
    """Everything in a folder: names, contents."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def flip(path, at=-1):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def resealed(data, change):
    """A sealed document with its content changed and a new seal: what a forger without the key can do."""
    from ckpt.sealed import seal

    body = json.loads(data)
    body.pop("~seal")
    change(body)
    return seal(body)
