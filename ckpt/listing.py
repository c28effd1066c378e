"""What the command line shows of runs and checkpoints, as plain data and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt.checkpoint import Checkpoint, Fact
from ckpt.discover import attempts_of, committed
from ckpt.errors import CheckpointError
from ckpt.launches import launch_numbers, read_launch
from ckpt.names import RUN_FILE, join
from ckpt.pins import pins
from ckpt.run import Run, read_run_file
from ckpt.store import Store, open_store

_THREADS = 16
_MAX_METRICS = 4
_MAX_COST = 1e15
_HEAD = ("step", "launch", "committed", "size", "written in")


def runs_in(store: Store) -> list[dict[str, Any]]:
    """The runs directly in a folder, by name."""
    found = []
    for entry in sorted(store.list()):
        if not entry.is_dir or store.size(f"{entry.name}/{RUN_FILE}") is None:
            continue
        inner = open_store(join(store.uri, entry.name))
        try:
            info = read_run_file(inner) or {}
            state = _run_state(inner)
        except CheckpointError as error:
            info, state = {}, f"damaged: {error}"
        found.append(
            {"name": entry.name, "uri": inner.uri, "created": str(info.get("created", "")), "state": state}
        )
    return found


def of_run(run: Run) -> dict[str, Any]:
    """A run with its checkpoints, newest first, and its uncommitted attempts."""
    listed = committed(run)
    with ThreadPoolExecutor(_THREADS) as pool:
        rows = list(pool.map(_row, listed))
    tags: dict[str, list[str]] = {}
    for pin in pins(run):
        if not pin.expired:
            tags.setdefault(pin.attempt, []).append(pin.name)
    for row in rows:
        row["tags"] = tags.get(row["attempt"], [])
    there = {item.attempt for item in listed}
    uncommitted = [
        {"attempt": item.name, "step": item.step, "launch": item.launch}
        for item in sorted(attempts_of(run.store), key=lambda item: (-item.launch, -item.step))
        if item.name not in there
    ]
    return {
        "run": {"name": run.name, "uri": run.uri, "id": run.id, "created": run.info.get("created")},
        "state": _run_state(run.store),
        "checkpoints": rows,
        "uncommitted": uncommitted,
    }


def facts(run: Run) -> tuple[list[Fact], list[str]]:
    """The history that policies decide over, newest first, and the attempts whose manifest can't be read."""
    listed = committed(run)
    with ThreadPoolExecutor(_THREADS) as pool:
        read = list(pool.map(_fact, listed))
    damaged = [item.attempt for item, fact in zip(listed, read, strict=True) if fact is None]
    return [fact for fact in read if fact is not None], damaged


def _fact(checkpoint: Checkpoint) -> Fact | None:
    try:
        return checkpoint.fact
    except CheckpointError:
        return None


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": checkpoint.step,
        "launch": checkpoint.launch,
        "attempt": checkpoint.attempt,
        "uri": checkpoint.uri,
        "abandoned": checkpoint.abandoned,
        "damaged": None,
        "committed_at": None,
        "bytes": None,
        "costs": {},
        "metrics": {},
    }
    try:
        row["committed_at"] = checkpoint.committed_at.isoformat(timespec="seconds")
        row["bytes"] = checkpoint.manifest.nbytes
        row["costs"] = checkpoint.manifest.costs
        row["metrics"] = checkpoint.metrics
    except CheckpointError as error:
        row["damaged"] = str(error)
    return row


def _run_state(store: Store) -> str:
    numbers = launch_numbers(store)
    if not numbers:
        return "never launched"
    last = read_launch(store, numbers[-1])
    if last.end is None:
        return f"launch {last.number} recorded no end"
    step = last.end.get("last_step")
    return f"launch {last.number} {last.end.get('outcome')}" + (
        f" at step {step}" if step is not None else ""
    )


def runs_text(runs: Sequence[dict[str, Any]]) -> str:
    """A table of runs."""
    rows = [[run["name"], run["created"], run["state"]] for run in runs]
    return _table(["run", "created", "state"], rows)


def run_text(data: dict[str, Any]) -> str:
    """A run's checkpoints as a table."""
    run, rows = data["run"], data["checkpoints"]
    lines = [f"{run['uri']}  (id {run['id']}, created {run['created']}; {data['state']})"]
    names = sorted({name for row in rows for name in row["metrics"]})[:_MAX_METRICS]
    table = []
    for row in rows:
        marks = [*(f"[{tag}]" for tag in row["tags"])]
        marks += ["abandoned"] if row["abandoned"] else []
        marks += [f"damaged: {row['damaged']}"] if row["damaged"] else []
        table.append(
            [
                str(row["step"]),
                str(row["launch"]),
                row["committed_at"] or "-",
                size_text(row["bytes"]),
                _cost_text("persist_s", row["costs"].get("persist_s")),
                *(_metric_text(row["metrics"].get(name)) for name in names),
                row["attempt"],
                " ".join(marks),
            ]
        )
    table += [
        [
            str(item["step"]),
            str(item["launch"]),
            *("-" * 3),
            *("-" for _ in names),
            item["attempt"],
            "uncommitted",
        ]
        for item in data["uncommitted"]
    ]
    if not table:
        return f"{lines[0]}\nno checkpoint yet"
    return "\n".join([*lines, _table([*_HEAD, *names, "folder", ""], table)])


def summary_text(data: dict[str, Any]) -> str:
    """A checkpoint's own account, one line a field."""
    lines = []
    for key, value in data.items():
        if key == "bytes":
            value = f"{value} ({size_text(value)})"
        if isinstance(value, dict):
            lines.append(f"{key}:{'' if value else ' -'}")
            if key == "costs":
                value = {name.removesuffix("_s"): _cost_text(name, item) for name, item in value.items()}
            lines += [f"  {name}: {item}" for name, item in value.items()]
        elif isinstance(value, list):
            lines.append(f"{key}: {', '.join(map(str, value)) or '-'}")
        else:
            lines.append(f"{key}: {'-' if value is None else value}")
    return "\n".join(lines)


def plain(data: Any) -> Any:
    """The same data as strict JSON takes it: what JSON has no form for, NaN included, as text."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if (
        data is None
        or isinstance(data, str | bool | int)
        or (isinstance(data, float) and math.isfinite(data))
    ):
        return data
    return str(data)


def size_text(nbytes: int | None) -> str:
    """Bytes in a unit fit for reading."""
    if nbytes is None:
        return "-"
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def time_text(seconds: float) -> str:
    """A time span in a unit fit for reading."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"


def _cost_text(name: str, value: Any) -> str:
    """A manifest's cost, by the unit that its name ends in. It may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_COST:
        return "-" if value is None else str(value)
    if name.endswith("_s"):
        return time_text(value)
    return size_text(int(value)) if name == "bytes" else str(value)


def _metric_text(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    )
