"""From what the processes told to the figures that are reported, and whether the run is good for anything."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

from bench import verdict
from bench.children import Outcome
from bench.engines import FLOOR, NULL, OWN, REFERENCE
from bench.intervals import Interval, bootstrap
from bench.memory import flat
from bench.places import in_bucket
from bench.spec import Spec

FIGURES = (
    "stall_s",
    "first_stall_s",
    "join_s",
    "overhead_s",
    "durable_s",
    "gil_s",
    "restore_s",
    "restore_warm_s",
    "memory_bytes",
    "steal_s",
    "writeback_s",
)
# A null interval within this share of the reference's overhead: else ratios to it mean nothing.
_NULL_WITHIN = 0.02
_PLACES = ("folder", "disk", "store_disk")
_SAMPLES = ("memcpy_s", "write_s", "read_s", "read_beside_s", "step_s")


def summarize(
    spec: Spec,
    limits: dict[str, Any],
    outcomes: dict[str, Outcome],
    failing: Outcome | None = None,
    beside: Mapping[str, Outcome] | None = None,
) -> dict[str, Any]:
    """The whole report as JSON, in seconds and bytes; `problems` say why it is not `valid`, if it isn't.

    limits: as `pooled`. failing: the own engine while every save fails. beside: what was measured for the
    verdict on a bucket only, by job.
    """
    null = outcomes[NULL]
    engines = {key: _figures(outcome, null, limits) for key, outcome in outcomes.items()}
    if failing is not None and failing.status == "ok":
        engines[OWN]["memory_failing_bytes"] = _above(failing.memory, null.memory)
        engines[OWN]["memory_failing_flat"] = flat(failing.memory, limits["state_bytes"])
        engines[OWN]["samples"]["memory_failing_bytes"] = failing.memory
    for figures in engines.values():
        figures["ratios"] = _ratios(figures, engines, limits)
    problems = _problems(engines, spec.quick)
    if failing is not None and failing.status != "ok":
        problems.append(f"{OWN} with every save failing: {failing.reason}")
    aside = {}
    for job, outcome in (beside or {}).items():
        aside[job] = _figures(outcome, null, limits)
        if outcome.status != "ok":
            problems.append(f"{OWN}, {job}: {outcome.reason}")
    cpus = len(os.sched_getaffinity(0))
    return {
        "format": 2,
        "valid": not problems,
        "problems": problems,
        "quick": spec.quick,
        "storage": "bucket" if in_bucket(spec.folder) else "folder",
        "spec": {name: value for name, value in asdict(spec).items() if name not in _PLACES},
        "machine": {
            "cpus": cpus,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
        "limits": limits,
        "engines": engines,
        "beside": aside,
        "verdict": [asdict(target) for target in verdict.judge(engines, limits, spec, cpus, aside)],
    }


def pooled(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The limits measured at several times as one: medians of all their samples, which stay in `samples`."""
    samples = {name: [each[name] for each in measured] for name in _SAMPLES}
    medians = {name: statistics.median(chain(*lists)) for name, lists in samples.items()}
    return {**measured[0], **medians, "samples": samples}


def joined(first: Outcome, second: Outcome) -> Outcome:
    """An engine that was measured twice: all its pairs of windows together, all else as the first time."""
    for outcome in (first, second):
        if outcome.status != "ok":
            return outcome
    one, other = first.figures["costs"], second.figures["costs"]
    costs = {name: one[name] + other[name] for name in one if isinstance(one[name], list)}
    interval = asdict(bootstrap(costs["overhead_s"]))
    return replace(first, figures={**first.figures, "costs": {**one, **costs, "interval": interval}})


def _figures(outcome: Outcome, null: Outcome, limits: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason}
    if outcome.status != "ok":
        return known
    told = outcome.figures
    costs, restore = told["costs"], told["restore"]
    busy = told.get("device_busy")
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
        "gil_s": statistics.median(told["gil_s"]) if "gil_s" in told else None,
        "restore_s": statistics.median(restore["cold_s"]) if restore else None,
        "restore_warm_s": statistics.median(restore["warm_s"]) if restore else None,
        "equal": not restore["different"] if restore else None,
        "memory_bytes": _above(outcome.memory, null.memory),
        "memory_flat": flat(outcome.memory, limits["state_bytes"]),
        "steal_s": statistics.median(costs["steal_s"]),
        "writeback_s": statistics.median(costs["writeback_s"]),
        "device_busy": {name: statistics.median(shares) for name, shares in busy.items()} if busy else None,
        "lost_share": told.get("every", {}),
        "samples": {
            **costs,
            "gil_s": told.get("gil_s", []),
            "memory_bytes": outcome.memory,
            "restore": restore,
            "device_busy": busy,
        },
    }
    return known


def _above(memory: list[int], null: list[int]) -> int | None:
    return max(memory) - max(null) if memory and null else None


def _ratios(
    figures: dict[str, Any], engines: dict[str, dict[str, Any]], limits: dict[str, Any]
) -> dict[str, Any]:
    reference = engines.get(REFERENCE, {})
    # What the hardware needs for a figure.
    limit_of = {
        "overhead_s": engines.get(FLOOR, {}).get("overhead_s"),
        "durable_s": limits["write_s"],
        "restore_s": limits["read_s"],
        "memory_bytes": limits["state_bytes"],
    }
    return {
        "to_reference": {name: _ratio(figures.get(name), reference.get(name)) for name in FIGURES},
        "to_limit": {name: _ratio(figures.get(name), limit) for name, limit in limit_of.items()},
    }


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to or to < 0 else value / to


def _problems(engines: dict[str, dict[str, Any]], quick: bool) -> list[str]:
    found = [f"{key} failed: {f['reason']}" for key, f in engines.items() if f["status"] == "failed"]
    found += [
        f"{key}: what came back is not what was saved"
        for key, f in engines.items()
        if f.get("equal") is False
    ]
    null, reference = engines[NULL], engines.get(REFERENCE, {})
    if null["status"] == "ok":
        interval = Interval(null["overhead_s"], null["overhead_low_s"], null["overhead_high_s"])
        between = f"{1e3 * interval.low:.1f} to {1e3 * interval.high:.1f} ms"
        if not interval.holds_zero:
            found.append(
                f"discard this run: saving nothing seems to cost {between}, so the machine was not quiet"
            )
        if not quick and reference.get("status") == "ok":
            allowed = _NULL_WITHIN * reference["overhead_s"]
            if not -allowed <= interval.low <= interval.high <= allowed:
                found.append(
                    "not conclusive for overhead: more pairs or a quieter machine are needed, for saving "
                    f"nothing costs {between} here and +-{1e3 * allowed:.1f} ms would do "
                    f"({_NULL_WITHIN:.0%} of {reference['title']}'s)"
                )
    return found
