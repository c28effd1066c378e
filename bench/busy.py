"""For which share of the time a CUDA device computes, with and without saves; outside the paired windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import quiet
from bench.loop import Loop
from bench.places import Place

_COPIES = ("Memcpy", "Memset")


def measure(loop: Loop, pairs: int, window: int, folder: Place) -> dict[str, list[float]]:
    """The shares, from 0 to 1, of `pairs` windows without ("control") and as many with a save ("save").

    Copies to and from the device are not counted: they are what a save adds. Raises what makes a save fail.
    """
    shares: dict[str, list[float]] = {"control": [], "save": []}
    for _ in range(pairs):
        shares["control"].append(_share(lambda: loop.control(window).seconds))
        shares["save"].append(_share(lambda: loop.save(window).seconds))
        loop.engine.wait_durable()
        quiet.settle(loop, folder)
    return shares


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans (start, end) cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _share(run: Callable[[], float]) -> float:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds = run()
    return covered(map(_span, filter(_computes, recorded.events() or []))) / seconds


def _computes(event: Any) -> bool:
    on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return on_device and not event.name.startswith(_COPIES)


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start / 1e6, event.time_range.end / 1e6
