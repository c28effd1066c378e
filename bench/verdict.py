"""What this project asks of its own engine, beside what this run found; nothing here decides an exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.engines import OWN, PEERS, REFERENCE, UPLOAD
from bench.places import in_bucket
from bench.spec import FOLDER, Spec
from bench.words import seconds

Engines = dict[str, dict[str, Any]]

MANY_TENSORS = 10_000
_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """One thing that is asked. met: None where it could not be measured."""

    name: str
    measured: str
    asked: str
    met: bool | None


def judge(
    engines: Engines, limits: dict[str, Any], spec: Spec, cpus: int, beside: Engines | None = None
) -> list[Target]:
    """All targets, from the figures of one run; none if the own engine has no figures.

    `cpus`: how many processors there are for training and all else. `beside`: as in `bench.results`.
    """
    own = engines.get(OWN, {})
    if own.get("status") != "ok":
        return []
    judged = _Judge(own, engines)
    spare, alone = spec.threads < cpus, spec.threads == 1
    held = _held(own)
    memory = own["memory_bytes"]
    targets = [
        judged.share("stall + join", held, _of(engines, REFERENCE, "stall_s"), "dcp.save's stall", 1000),
        judged.peers("stall + join", _held, 1e-3),
        judged.at_most("first save", own["first_stall_s"], 10e-3),
        judged.share(
            "overhead",
            own["overhead_s"],
            _of(engines, REFERENCE, "overhead_s"),
            "dcp.save's",
            15 if spare else 4,
        ),
        judged.peers("overhead", lambda figures: figures["overhead_s"]),
    ]
    if in_bucket(spec.folder):
        targets += _of_bucket(judged, own, engines, limits, beside or {})
    else:
        targets += _of_folder(judged, own, engines, limits, alone)
    targets += [
        judged.peers("verified restore", lambda figures: figures["restore_s"]),
        judged.times("memory", memory, limits["state_bytes"], "the state", 1.2),
        judged.flat("memory over the saves", own["memory_flat"]),
        judged.flat("memory over failing saves", own.get("memory_failing_flat")),
    ]
    if spec.tensors >= MANY_TENSORS:
        targets.append(judged.at_most("stall + join, many tensors", held, 10e-3))
        targets.append(judged.at_most("interpreter lock held, many tensors", own["gil_s"], 0.15))
    return targets


def _of_folder(
    judged: _Judge, own: dict[str, Any], engines: Engines, limits: dict[str, Any], alone: bool
) -> list[Target]:
    """Against the disk. `alone`: one thread trains."""
    targets = [
        judged.times("durable", own["durable_s"], limits["write_s"], "the raw write", 1.15 if alone else 1.3)
    ]
    if alone:
        durable = _of(engines, REFERENCE, "durable_s")
        targets.append(judged.times("durable", own["durable_s"], durable, "dcp.save's", 1.0))
    return [
        *targets,
        judged.times("verified restore", own["restore_s"], limits["read_s"], "the raw read", 1.3),
        judged.times(
            "verified restore", own["restore_s"], _of(engines, REFERENCE, "restore_s"), "dcp.load", 0.6
        ),
    ]


def _of_bucket(
    judged: _Judge, own: dict[str, Any], engines: Engines, limits: dict[str, Any], beside: Engines
) -> list[Target]:
    """Against the object store, and against a folder of this machine."""
    put_s, both_s = limits["write_s"], limits["write_s"] + limits["read_beside_s"]
    durable_s, restore_s = own["durable_s"], own["restore_s"]
    folder = beside.get(FOLDER, {})
    folder_s = _held(folder) if folder.get("status") == "ok" else None
    return [
        judged.speed("upload", _of(beside, UPLOAD, "durable_s"), put_s, "the raw PUT's", 0.9),
        judged.speed("durable", durable_s, both_s, "raw PUT and GET's", 0.9),
        judged.speed("durable", durable_s, _of(engines, REFERENCE, "durable_s"), "dcp.save's", 2.0),
        judged.speed("verified restore", restore_s, limits["read_s"], "the raw GET's", 0.8),
        judged.times("stall + join", _held(own), folder_s, "the folder's", 1.5),
    ]


def lines(verdict: list[dict[str, Any]]) -> list[str]:
    """The verdict for people, a line per target."""
    marks = {True: "met", False: "missed", None: ""}
    widths = [max((len(row[name]) for row in verdict), default=0) for name in ("name", "measured", "asked")]
    return [
        f"{row['name']:<{widths[0]}}  {row['measured']:<{widths[1]}}  asked: {row['asked']:<{widths[2]}}  "
        f"{marks[row['met']]}".rstrip()
        for row in verdict
    ]


class _Judge:
    def __init__(self, own: dict[str, Any], engines: Engines) -> None:
        self._own = own
        self._peers = [engines[key] for key in PEERS if engines.get(key, {}).get("status") == "ok"]

    def share(self, name: str, value: float, whole: float | None, of: str, parts: int) -> Target:
        """At most one part of so many."""
        asked = f"1/{parts} of {of}"
        if not whole or whole < 0:
            return Target(name, _NOT_MEASURED, asked, None)
        measured = f"1/{whole / value:.4g} of {of}" if value > 0 else f"nothing of {of}"
        return Target(name, measured, asked, value <= whole / parts)

    def times(self, name: str, value: float | None, unit: float | None, of: str, most: float) -> Target:
        """At most so many times as much; below 1 in any case if it is 1."""
        asked = f"{most:g} x {of}" if most != 1 else f"below {of}"
        if value is None or not unit or unit < 0:
            return Target(name, _NOT_MEASURED, asked, None)
        ratio = value / unit
        return Target(name, f"{ratio:.3g} x {of}", asked, ratio < 1 if most == 1 else ratio <= most)

    def speed(self, name: str, value: float | None, unit: float | None, of: str, least: float) -> Target:
        """At least so many times as fast as what takes `unit` seconds."""
        asked = f"{least:g} x {of} speed"
        if not value or not unit or min(value, unit) < 0:
            return Target(name, _NOT_MEASURED, asked, None)
        return Target(name, f"{unit / value:.3g} x {of} speed", asked, unit / value >= least)

    def at_most(self, name: str, value: float | None, most: float) -> Target:
        """At most so many seconds."""
        if value is None:
            return Target(name, _NOT_MEASURED, seconds(most), None)
        return Target(name, seconds(value), seconds(most), value <= most)

    def peers(self, name: str, figure: Callable[[dict[str, Any]], Any], slack: float = 0.0) -> Target:
        """Below what every peer needs, or at most so many seconds above it."""
        asked = f"the best peer's + {seconds(slack)}" if slack else "below every peer's"
        value = figure(self._own)
        known = [(figure(peer), peer["title"]) for peer in self._peers]
        known = [(theirs, title) for theirs, title in known if theirs is not None]
        if value is None or not known:
            return Target(name, _NOT_MEASURED, asked, None)
        best, title = min(known)
        met = value <= best + slack if slack else value < best
        return Target(name, f"{seconds(value)}, {title} {seconds(best)}", asked, met)

    def flat(self, name: str, found: bool | None) -> Target:
        """Memory that does not grow."""
        measured = {True: "flat", False: "not flat", None: _NOT_MEASURED}[found]
        return Target(name, measured, "flat from the third on", found)


def _held(figures: dict[str, Any]) -> float:
    return float(figures["stall_s"] + figures["join_s"])


def _of(engines: Engines, key: str, name: str) -> float | None:
    found: float | None = engines.get(key, {}).get(name)
    return found
