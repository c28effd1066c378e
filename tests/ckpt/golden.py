"""A small run as format 1 wrote it, and what it holds.

It was written once by `python -m tests.ckpt.golden`, and stays readable for good.
"""

import datetime as dt
import sys
from pathlib import Path

import numpy as np

from tests.ckpt import making

FOLDER = Path(__file__).parent / "golden" / "format-1"
ATTEMPT = "step-000000050-00002-3f9c0a1b"
BLAKE3_ATTEMPT = "step-000000040-00001-00ff00ff"
ABANDONED = "step-000000045-00001-00ab00ab"
METRICS = {"loss": 0.1, "accuracy": 7, "nothing": float("inf")}
VALUES = {
    "step": 50,
    "big": 2**70,
    "floats": [0.1, -0.0, float("-inf"), 5e-324],
    "text": "ünï\n\ud800",
    "bytes": b"\x00\xff",
    "nested": {"z": (1, (2.5, None)), "a": {"true": True}, 3: {1, 2}},
    "when": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
    "where": Path("/a b"),
    "array": np.arange(4, dtype=np.uint16).reshape(2, 2),
}


def state():
    return {
        "model.weight": np.arange(24, dtype=np.float32).reshape(8, 3) / 7,
        "model.half": np.arange(5, dtype=np.float16),
        "model.mask": np.array([True, False, True]),
        "model.count": np.array(2**40, dtype=np.int64),
        "model.none": np.zeros((0, 3), dtype=np.float64),
        "model.big": np.array([2**64 - 1, 0], dtype=np.uint64),
        "model.odd": np.array([1 + 2j, -3j], dtype=np.complex128),
    }


def write(folder):
    from ckpt.run import open_run

    run = open_run(folder, info={"project": "golden"})
    making.launch(run, 1, fresh=True)
    first = making.checkpoint(run, 40, 1, attempt=BLAKE3_ATTEMPT, state=state(), kind="blake3")
    making.checkpoint(run, 45, 1, attempt=ABANDONED, state={"model.count": np.array(1)})
    making.launch(run, 2, parent=first)
    making.checkpoint(
        run,
        50,
        2,
        attempt=ATTEMPT,
        state=state(),
        world_size=2,
        metrics=METRICS,
        plain=VALUES,
        parent={"attempt": BLAKE3_ATTEMPT, "step": 40, "launch": 1},
    )


if __name__ == "__main__":
    if FOLDER.exists():
        sys.exit(f"{FOLDER} is there: format 1 is written once and for all")
    write(FOLDER)
