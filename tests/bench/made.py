"""Outcomes of measurements, made up."""

from dataclasses import asdict

from bench.children import Outcome
from bench.intervals import bootstrap


def outcome(overheads=(0.0,), different=(), memory=10, restore=1.0, every=None, **medians):
    """What an engine's process tells: `overheads`, and one sample each of all else."""
    samples = {"stall_s": 0.5, "join_s": 0.5, "durable_s": 0.5, "steal_s": 0.0, "writeback_s": 0.0} | medians
    costs = {name: [value] for name, value in samples.items() if name != "gil_s"}
    costs |= {"overhead_s": list(overheads), "step_s": 0.1, "interval": asdict(bootstrap(overheads))}
    told = {
        "title": "t",
        "note": "",
        "costs": costs,
        "gil_s": [medians.get("gil_s", 0.1)],
        "restore": {"cold_s": [restore], "warm_s": [restore], "different": list(different)},
        "every": every or {},
        "first": {"stall_s": 0.1, "join_s": 0.2},
    }
    return Outcome("ok", "", told, [memory, memory + 5])


def limits():
    """What the limits' process tells."""
    told = {name: [0.25] for name in ("memcpy_s", "write_s", "read_s", "read_beside_s", "step_s")}
    return Outcome("ok", "", told | {"state_bytes": 20, "direct": True, "batch": 8, "window": 4})
