"""The random state of this rank: Python, NumPy, torch on the CPU and on CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from training.order import sample_seed

RANK_STREAM = (1 << 64) - 1  # no epoch has this number, so a rank's seed is never a sample's


def seed_all(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Seed this rank's own streams (dropout and the like), different on every rank."""
    seed_all(sample_seed(seed, RANK_STREAM, rank))


def capture() -> dict[str, Any]:
    """The present state, as plain values and uint8 tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def put_back(state: Mapping[str, Any]) -> None:
    """Return to a captured state. CUDA streams without a device here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(dict(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():
        for device, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace."""
    state = capture()
    try:
        yield
    finally:
        put_back(state)


class RngState:
    """The state entry for the checkpoint: each rank has its own."""

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """See ``capture``."""
        return capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``put_back``."""
        put_back(state)
