"""The figures as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.engines import NULL

_COLUMNS = (
    ("stall", "stall_s"),
    ("first", "first_stall_s"),
    ("join", "join_s"),
    ("overhead", "overhead_s"),
    ("durable", "durable_s"),
    ("restore", "restore_s"),
    ("warm", "restore_warm_s"),
    ("memory", "memory_bytes"),
)
_LEGEND = """\
stall, join: medians of what one save holds training up, at the call and before the optimizer's step.
first: stall + join of the first save. overhead: all that training lost, median (90 % interval).
durable: until whole on storage. restore: caches dropped; warm: not. memory: PSS above nothing saved.
Below each figure its ratio to dcp.save (x) and to the raw limit (L: copy, write + fsync, read, state)."""


def table(results: dict[str, Any]) -> str:
    """The report for people, in lines of at most about 130 characters."""
    limits = results["limits"]
    lines = [
        f"{limits['state_bytes'] / 1e6:.0f} MB of state, {results['spec']['threads']} training thread(s) on "
        f"{results['spec']['device']}, steps of {_seconds(limits['step_s'])}, "
        f"{results['spec']['pairs']} pairs of {limits['window']} steps",
        f"raw limits: copy {_seconds(limits['memcpy_s'])}, write + fsync {_seconds(limits['write_s'])}, "
        f"read {_seconds(limits['read_s'])}" + ("" if limits["direct"] else " (O_DIRECT is refused here)"),
        "",
    ]
    rows: list[list[str]] = [["", *(title for title, _ in _COLUMNS)]]
    for key, figures in results["engines"].items():
        if figures["status"] == "ok":
            rows += _rows(key, figures)
    lines += _aligned(rows)
    lines += ["", *_frequencies(results["engines"]), _LEGEND]
    for key, figures in results["engines"].items():
        if figures["status"] != "ok":
            lines.append(f"{key} is {figures['status']}: {figures['reason']}")
        elif figures["note"]:
            lines.append(f"{figures['title']}: {figures['note']}")
    if results["quick"]:
        lines.append("A quick run: it shows that all works; its figures mean nothing.")
    lines += results["problems"]
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
        text = f"{value / 1e6:.0f} MB" if name == "memory_bytes" else _seconds(value)
        if name == "overhead_s":
            text += f" ({_seconds(figures['overhead_low_s'])} .. {_seconds(figures['overhead_high_s'])})"
        values.append(text)
        known = [
            ("x", figures["ratios"]["to_reference"].get(name)),
            ("L", figures["ratios"]["to_limit"].get(name)),
        ]
        ratios.append(" ".join(f"{ratio:.3g}{unit}" for unit, ratio in known if ratio is not None))
    return [values, ratios] if key != NULL else [values]


def _frequencies(engines: dict[str, dict[str, Any]]) -> list[str]:
    known = {f["title"]: f["lost_share"] for f in engines.values() if f["status"] == "ok" and f["lost_share"]}
    if not known:
        return []
    every = list(next(iter(known.values())))
    rows = [["training time lost, a save every", *(f"{steps} steps" for steps in every)]]
    rows += [[title, *(f"{100 * shares[steps]:.1f} %" for steps in every)] for title, shares in known.items()]
    return [*_aligned(rows), ""]


def _seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.0f} us"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
