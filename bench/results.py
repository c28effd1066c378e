"""From what the processes told to the figures that are reported, and the verdict on the run."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from bench.children import Outcome
from bench.engines import NULL, REFERENCE
from bench.intervals import Interval
from bench.spec import Spec

# figure -> what the hardware would need for it
LIMIT_OF = {
    "overhead_s": "memcpy_s",
    "durable_s": "write_s",
    "restore_s": "read_s",
    "memory_bytes": "state_bytes",
}
FIGURES = (
    "stall_s",
    "first_stall_s",
    "join_s",
    "overhead_s",
    "durable_s",
    "restore_s",
    "restore_warm_s",
    "memory_bytes",
)


def summarize(spec: Spec, limits: dict[str, Any], outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The whole report as JSON, in seconds and bytes; `problems` say why it is not `valid`, if it isn't."""
    null = outcomes[NULL]
    engines = {key: _figures(outcome, null) for key, outcome in outcomes.items()}
    for figures in engines.values():
        figures["ratios"] = _ratios(figures, engines.get(REFERENCE, {}), limits)
    problems = _problems(engines)
    return {
        "format": 1,
        "valid": not problems,
        "problems": problems,
        "quick": spec.quick,
        "spec": {name: value for name, value in asdict(spec).items() if name != "folder"},
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
        "limits": limits,
        "engines": engines,
    }


def _figures(outcome: Outcome, null: Outcome) -> dict[str, Any]:
    known: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason}
    if outcome.status != "ok":
        return known
    told = outcome.figures
    costs, restore = told["costs"], told["restore"]
    known |= {
        "title": told["title"],
        "note": told["note"],
        "stall_s": statistics.median(costs["stall_s"]),
        "first_stall_s": told["first"]["stall_s"] + told["first"]["join_s"],
        "join_s": statistics.median(costs["join_s"]),
        "overhead_s": costs["interval"]["median"],
        "overhead_low_s": costs["interval"]["low"],
        "overhead_high_s": costs["interval"]["high"],
        "durable_s": statistics.median(costs["durable_s"]),
        "restore_s": statistics.median(restore["cold_s"]) if restore else None,
        "restore_warm_s": statistics.median(restore["warm_s"]) if restore else None,
        "equal": not restore["different"] if restore else None,
        "memory_bytes": max(outcome.memory) - max(null.memory) if null.memory else None,
        "lost_share": told.get("every", {}),
        "samples": {**costs, "memory_bytes": outcome.memory, "restore": restore},
    }
    return known


def _ratios(figures: dict[str, Any], reference: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    return {
        "to_reference": {name: _ratio(figures.get(name), reference.get(name)) for name in FIGURES},
        "to_limit": {name: _ratio(figures.get(name), limits[of]) for name, of in LIMIT_OF.items()},
    }


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to or to < 0 else value / to


def _problems(engines: dict[str, dict[str, Any]]) -> list[str]:
    found = [f"{key} failed: {f['reason']}" for key, f in engines.items() if f["status"] == "failed"]
    found += [
        f"{key}: what came back is not what was saved"
        for key, f in engines.items()
        if f.get("equal") is False
    ]
    null = engines[NULL]
    if null["status"] == "ok":
        interval = Interval(null["overhead_s"], null["overhead_low_s"], null["overhead_high_s"])
        if not interval.holds_zero:
            found.append(
                "discard this run: saving nothing seems to cost "
                f"{1e3 * interval.low:.1f} to {1e3 * interval.high:.1f} ms, so the machine was not quiet"
            )
    return found
