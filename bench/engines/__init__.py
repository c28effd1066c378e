"""The engines by the key they are asked for with. Each is imported in its own process only."""

from __future__ import annotations

from importlib import import_module

from bench.engines.base import Engine

_HOMES = {
    "null": ("bench.engines.null", "Null"),
    "torch_save": ("bench.engines.torch_save", "TorchSave"),
    "dcp_save": ("bench.engines.dcp_save", "DcpSave"),
    "dcp_async_thread": ("bench.engines.dcp_async", "Thread"),
    "dcp_async_staged": ("bench.engines.dcp_async", "Staged"),
    "dcp_async_process": ("bench.engines.dcp_async", "Process"),
    "torch_checkpointing": ("bench.engines.torch_checkpointing", "TorchCheckpointing"),
    "engine": ("bench.engines.engine", "OwnEngine"),
}
KEYS = tuple(_HOMES)
NULL, REFERENCE = "null", "dcp_save"


def make(key: str) -> Engine:
    """A new engine. Raises `bench.engines.base.Absent`, with the reason, if it can't be had here."""
    home, name = _HOMES[key]
    engine: Engine = getattr(import_module(home), name)()
    return engine
