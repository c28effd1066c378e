"""Asynchronous, verified, resumable checkpoints for PyTorch.

The names below are loaded on first use, so that the parts which need no torch (the writer process, discovery,
verification, the command line) start without it.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "CheckpointManager": "ckpt.manager",
    "open_run": "ckpt.run",
    "checkpoints": "ckpt.discover",
    "latest_valid": "ckpt.discover",
    "verify": "ckpt.verification",
    "load_tensors": "ckpt.tensors",
    "EverySteps": "ckpt.policies",
    "EveryMinutes": "ckpt.policies",
    "OverheadBudget": "ckpt.policies",
    "YoungDaly": "ckpt.policies",
    "Continuous": "ckpt.policies",
    "KeepLast": "ckpt.policies",
    "KeepEvery": "ckpt.policies",
    "KeepBest": "ckpt.policies",
    "CheckpointError": "ckpt.errors",
    "NotCommitted": "ckpt.errors",
    "Corrupt": "ckpt.errors",
    "Fenced": "ckpt.errors",
    "RunBusy": "ckpt.errors",
    "StateError": "ckpt.errors",
    "StorageError": "ckpt.errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
