"""Scikit-learn's handwritten digits."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.order import epoch_order, sample_rng

SPLIT_SEED = 1797  # the split is the data's, not the run's: all runs hold out the same rows


def read_table() -> np.ndarray:
    """The table as scikit-learn ships it: float32 (1797, 65), 64 grey values of 0 to 16 and the class.

    The file is read without importing scikit-learn, which takes longer than the training it would serve.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("data=digits needs scikit-learn: pip install scikit-learn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as lines:
        return np.loadtxt(lines, delimiter=",", dtype=np.float32)


class Rows:
    """Samples {"inputs": float32 (64,) of 0 to 1, "targets": int64 ()}; ``noise`` is added to inputs."""

    own_randomness = True

    def __init__(self, table: np.ndarray, noise: float) -> None:
        self._inputs = torch.from_numpy(table[:, :64] / np.float32(16))
        self._targets = torch.from_numpy(table[:, 64].astype(np.int64))
        self._noise = noise

    def __len__(self) -> int:
        return len(self._targets)

    def sample(self, index: int, epoch: int, seed: int) -> Mapping[str, Tensor]:
        """Row ``index``."""
        inputs = self._inputs[index]
        if self._noise:
            drawn = sample_rng(seed, epoch, index).standard_normal(64, dtype=np.float32)
            inputs = inputs + torch.from_numpy(drawn * np.float32(self._noise))
        return {"inputs": inputs, "targets": self._targets[index]}


class Digits:
    """1,797 pictures of 8 x 8; a fixed ``val_fraction`` of them is held out."""

    def __init__(self, val_fraction: float = 0.2, noise: float = 0.0) -> None:
        table = read_table()
        order = epoch_order(SPLIT_SEED, 0, len(table))
        held = max(1, round(val_fraction * len(table)))
        self._digest = hashlib.blake2b(table.tobytes(), digest_size=16).hexdigest()
        self.train = Rows(table[order[held:]], noise)
        self.val = Rows(table[order[:held]], 0.0)
        if not len(self.train):
            raise ValueError(f"data.val_fraction={val_fraction} leaves nothing to train on")

    def identity(self) -> dict[str, Any]:
        """The table's digest."""
        return {"data": "digits", "digest": self._digest}
