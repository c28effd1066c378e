"""The figures as pictures, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], beside: Path) -> list[Path]:
    """Write PNG files next to `beside` and named after it; none without matplotlib. Raises OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    engines = [figures for figures in results["engines"].values() if figures["status"] == "ok"]
    limit = "raw PUT" if results["storage"] == "bucket" else "raw write + fsync"
    drawn = [_costs(Figure(figsize=(9, 4.5), layout="constrained"), engines, results["limits"], limit)]
    if any(figures["lost_share"] for figures in engines):
        drawn.append(_frequency(Figure(figsize=(7, 4.5), layout="constrained"), engines))
    written = []
    for name, figure in zip(("costs", "frequency"), drawn, strict=False):
        path = beside.with_name(f"{beside.stem}-{name}.png")
        figure.savefig(path, dpi=150)
        written.append(path)
    return written


def _costs(figure: Any, engines: list[dict[str, Any]], limits: dict[str, Any], limit: str) -> Any:
    titles = [figures["title"] for figures in engines]
    left, right = figure.subplots(1, 2, sharey=True)
    medians = [figures["overhead_s"] for figures in engines]
    below = [m - figures["overhead_low_s"] for m, figures in zip(medians, engines, strict=True)]
    above = [figures["overhead_high_s"] - m for m, figures in zip(medians, engines, strict=True)]
    left.errorbar(medians, titles, xerr=[below, above], fmt="o", capsize=4)
    left.axvline(0.0, color="grey", linewidth=0.8)
    left.set(xlabel="overhead of one save (s)\nmedian and 90 % interval", ylabel="engine")
    left.invert_yaxis()
    right.barh(titles, [figures["durable_s"] for figures in engines], color="tab:green")
    right.axvline(limits["write_s"], color="black", linestyle="--", label=limit)
    right.set(xlabel="time until durable (s)\nmedian")
    right.legend()
    return figure


def _frequency(figure: Any, engines: list[dict[str, Any]]) -> Any:
    axes = figure.subplots()
    for figures in engines:
        shares = figures["lost_share"]
        axes.plot(
            [int(n) for n in shares], [100 * share for share in shares.values()], "o-", label=figures["title"]
        )
    axes.set(xscale="log", xlabel="steps from one save to the next", ylabel="training time lost (%)")
    axes.legend(fontsize="small")
    return figure
