"""Figures as words."""

from __future__ import annotations


def seconds(value: float) -> str:
    """In the unit that suits it: s, ms or us."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.0f} us"


def interval(median: float, low: float, high: float) -> str:
    """A median and its interval, all in one unit."""
    if max(abs(median), abs(low), abs(high)) >= 1:
        return f"{median:.2f} s ({low:.2f} .. {high:.2f})"
    return f"{1e3 * median:.1f} ms ({1e3 * low:.1f} .. {1e3 * high:.1f})"
