"""The engines by the key they are asked for with. Each is imported in its own process only."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from bench.engines.base import Engine

_HOMES = {
    "null": ("bench.engines.null", "Null"),
    "floor": ("bench.engines.floor", "Floor"),
    "torch_save": ("bench.engines.torch_save", "TorchSave"),
    "dcp_save": ("bench.engines.dcp_save", "DcpSave"),
    "dcp_async_thread": ("bench.engines.dcp_async", "Thread"),
    "dcp_async_staged": ("bench.engines.dcp_async", "Staged"),
    "dcp_async_process": ("bench.engines.dcp_async", "Process"),
    "torch_checkpointing": ("bench.engines.torch_checkpointing", "TorchCheckpointing"),
    "engine": ("bench.engines.engine", "OwnEngine"),
}
KEYS = tuple(_HOMES)
# Measured beside the own engine in a bucket only, and in no table.
UPLOAD = "upload"
_BESIDE = {UPLOAD: ("bench.engines.engine", "Unconfirmed")}
_FILES_ONLY = {
    "torch_save": "it writes files",
    "torch_checkpointing": "its storage is a file system",
}
NULL, FLOOR, REFERENCE, OWN = "null", "floor", "dcp_save", "engine"
# What every run needs to be judged; neither keeps anything that could be restored.
ALWAYS = (NULL, FLOOR)
PEERS = tuple(key for key in KEYS if key not in (*ALWAYS, OWN))


def make(key: str) -> Engine:
    """A new engine. Raises `bench.engines.base.Absent`, with the reason, if it can't be had here."""
    home, name = (_HOMES | _BESIDE)[key]
    engine: Engine = getattr(import_module(home), name)()
    return engine


def unfit_for_buckets(key: str) -> str | None:
    """Why an engine can't save to a bucket here; None if it can."""
    if key.startswith("dcp_") and find_spec("s3fs") is None:
        return "s3fs, by which it reaches a bucket, is not installed"
    return f"{_FILES_ONLY[key]}, not objects" if key in _FILES_ONLY else None
