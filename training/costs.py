"""What saving cost, as the flow and MLflow are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckpt.stats import SaveStats


def told(stats: SaveStats) -> dict[str, Any]:
    """The statistics of a launch as plain data, with what follows from them."""
    derived = {"lost_s": stats.lost_s, "overhead_percent": stats.overhead_percent}
    return dataclasses.asdict(stats) | derived


def metrics(committed: Mapping[str, Any], stats: SaveStats, world_size: int) -> dict[str, float]:
    """Metrics of a committed save's step, from the event that tells of it and the statistics so far.

    overhead_percent is the share of this launch's training time that stall and join took; slowed_percent
    estimates what its steps took longer beside a save. Bytes are those of rank 0's shard.
    """
    values = {
        "stall_ms": 1e3 * committed["stall_s"],
        "join_ms": 1e3 * committed["join_s"],
        "stage_s": committed["stage_s"],
        "persist_s": committed["persist_s"],
        "durable_s": committed["durable_s"],
        "bytes" if world_size == 1 else "bytes_of_rank_0": committed["bytes"],
    }
    if stats.overhead_percent is not None:
        values["overhead_percent"] = stats.overhead_percent
        values["slowed_percent"] = 100 * max(0.0, stats.slowed_s) / stats.trained_s
    return {f"checkpoint/{name}": float(value) for name, value in values.items()}
