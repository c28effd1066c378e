"""The figures as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import verdict
from bench.engines import ALWAYS, NULL
from bench.words import interval, seconds

_COLUMNS = (
    ("stall", "stall_s"),
    ("first", "first_stall_s"),
    ("join", "join_s"),
    ("overhead", "overhead_s"),
    ("durable", "durable_s"),
    ("lock", "gil_s"),
    ("restore", "restore_s"),
    ("warm", "restore_warm_s"),
    ("memory", "memory_bytes"),
)
_LEGEND = """\
stall, join: medians of what one save holds training up, at the call and before the optimizer's step.
first: stall + join of the first save. overhead: all that training lost until durable, median (90 % interval).
durable: until whole on storage. lock: for how long other threads held Python's interpreter lock.
restore: caches dropped; warm: not. memory: PSS above nothing saved.
Below each figure its ratio to dcp.save (x) and to the raw limit (L: overhead of raw copy + write; write +
fsync; read; state). What an engine leaves in memory for the machine to write back later is in no figure.
"""
_BUCKET_LEGEND = """\
stall, join: medians of what one save holds training up, at the call and before the optimizer's step.
first: stall + join of the first save. overhead: all that training lost until durable, median (90 % interval).
durable: until whole in the bucket. lock: for how long other threads held Python's interpreter lock.
restore, warm: both with what the store has in its caches. memory: PSS above nothing saved.
Below each figure its ratio to dcp.save by s3fs (x) and to the raw limit (L: overhead of raw copy + PUT; PUT;
GET; state).
"""
# Less than this is the journal's own work, which the engines that fsync leave behind as well.
_WRITTEN_BACK_S = 0.05


def table(results: dict[str, Any]) -> str:
    """The report for people, in lines of at most about 140 characters."""
    limits, engines = results["limits"], results["engines"]
    bucket = results["storage"] == "bucket"
    write, read = ("PUT", "GET") if bucket else ("write + fsync", "read")
    lines = [
        f"{limits['state_bytes'] / 1e6:.0f} MB of state in {results['spec']['tensors']} tensors, "
        f"{results['spec']['threads']} training thread(s) on {results['spec']['device']}, "
        f"{results['machine']['cpus']} processors, steps of {seconds(limits['step_s'])}, "
        f"{results['spec']['pairs']} pairs of {limits['window']} steps",
        f"raw limits: copy {seconds(limits['memcpy_s'])}, {write} {seconds(limits['write_s'])}, "
        f"{read} {seconds(limits['read_s'])}"
        + ("" if limits["direct"] or bucket else " (O_DIRECT is refused here)"),
        "",
    ]
    measured = {key: figures for key, figures in engines.items() if figures["status"] == "ok"}
    rows: list[list[str]] = [["", *(title for title, _ in _COLUMNS)]]
    for key, figures in measured.items():
        rows += _rows(key, figures)
    lines += ["  ".join(row).rstrip() for row in _aligned(rows)]
    lines += ["", *_shares(measured), (_BUCKET_LEGEND if bucket else _LEGEND).rstrip()]
    for key, figures in engines.items():
        lines += _remarks(key, figures)
    if results["quick"]:
        lines.append("A quick run: it shows that all works; its figures mean nothing.")
    if results["verdict"]:
        lines += ["", "verdict", *verdict.lines(results["verdict"])]
    if results["problems"]:
        lines += ["", *results["problems"]]
    return "\n".join(lines)


def _rows(key: str, figures: dict[str, Any]) -> list[list[str]]:
    values = [figures["title"]]
    ratios = [""]
    for _, name in _COLUMNS:
        value = figures[name]
        if value is None or (key == NULL and name in ("durable_s", "memory_bytes")):
            values.append("-")
            ratios.append("")
            continue
        if name == "memory_bytes":
            values.append(f"{value / 1e6:.0f} MB")
        elif name == "overhead_s":
            values.append(interval(value, figures["overhead_low_s"], figures["overhead_high_s"]))
        else:
            values.append(seconds(value))
        known = [
            ("x", figures["ratios"]["to_reference"].get(name)),
            ("L", figures["ratios"]["to_limit"].get(name)),
        ]
        ratios.append(" ".join(f"{ratio:.3g}{unit}" for unit, ratio in known if ratio is not None))
    return [values, ratios] if key not in ALWAYS else [values]


def _shares(engines: dict[str, dict[str, Any]]) -> list[str]:
    """The small tables of shares: of training time lost by how often is saved, of a device's time."""
    found: list[str] = []
    lost = {f["title"]: f["lost_share"] for f in engines.values() if f["lost_share"]}
    if lost:
        every = list(next(iter(lost.values())))
        rows = [["training time lost, a save every", *(f"{steps} steps" for steps in every)]]
        rows += [
            [title, *(f"{100 * shares[steps]:.1f} %" for steps in every)] for title, shares in lost.items()
        ]
        found += ["  ".join(row).rstrip() for row in _aligned(rows)] + [""]
    busy = {f["title"]: f["device_busy"] for f in engines.values() if f["device_busy"]}
    if busy:
        rows = [["the device computes", "without a save", "with one"]]
        rows += [
            [title, f"{100 * shares['control']:.1f} %", f"{100 * shares['save']:.1f} %"]
            for title, shares in busy.items()
        ]
        found += ["  ".join(row).rstrip() for row in _aligned(rows)] + [""]
    return found


def _remarks(key: str, figures: dict[str, Any]) -> list[str]:
    if figures["status"] != "ok":
        return [f"{key} is {figures['status']}: {figures['reason']}"]
    found = [figures["note"]] if figures["note"] else []
    if figures["writeback_s"] > _WRITTEN_BACK_S:
        found.append(f"write-back after each save, in no figure: {seconds(figures['writeback_s'])}")
    if figures["memory_flat"] is False:
        found.append("its memory is not flat")
    if figures.get("memory_failing_bytes") is not None:
        grows = "" if figures["memory_failing_flat"] else ", not flat"
        found.append(f"memory while every save fails: {figures['memory_failing_bytes'] / 1e6:.0f} MB{grows}")
    return [f"{figures['title']}: {'; '.join(found)}"] if found else []


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
