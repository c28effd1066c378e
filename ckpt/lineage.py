"""In which order a run's checkpoints stand: by launch and parent, never by a name's text, a file time or a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    """One attempt at one checkpoint, as its folder's name says."""

    name: str
    step: int
    launch: int


Parents = Callable[[int], Mapping[str, Any] | None]
"""What a launch recorded as its parent: `{"step", "launch"}`, or anything else if it went on from nothing."""


def walk(attempts: Iterable[Attempt], launches: Iterable[int], parent_of: Parents) -> Iterator[Attempt]:
    """The attempts on the run's line, newest first; launches' parents are asked for only as far as one
    iterates.

    The line starts at the newest launch, highest step first (of two at one step the later), and goes on at
    the checkpoint that launch went on from, with those below it of the same launch, and so on. A launch that
    recorded no parent is followed by the next lower launch: so one that died before it restored, or made
    nothing from a fresh start, is passed over.
    """
    by_launch: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        by_launch.setdefault(attempt.launch, []).append(attempt)
    todo = sorted({*launches, *by_launch})
    highest_step: int | None = None
    while todo:
        launch = todo.pop()
        for attempt in sorted(by_launch.get(launch, []), key=_age, reverse=True):
            if highest_step is None or attempt.step <= highest_step:
                yield attempt
        highest_step = None
        parent = _checked(parent_of(launch), launch)
        if parent is not None:
            step, older = parent
            # Parents are always older launches; what lies between them and this one is abandoned.
            todo = [*(number for number in todo if number < older), older]
            highest_step = step


def _checked(parent: Mapping[str, Any] | None, launch: int) -> tuple[int, int] | None:
    step, older = (parent.get("step"), parent.get("launch")) if parent else (None, None)
    if type(step) is not int or type(older) is not int or not 0 < older < launch:
        return None
    return step, older


def _age(attempt: Attempt) -> tuple[int, int, str]:
    # A launch numbers its attempts, and an attempt's word begins with that number.
    return attempt.launch, attempt.step, attempt.name


def order(
    attempts: Sequence[Attempt], launches: Iterable[int], parent_of: Parents
) -> tuple[list[Attempt], list[Attempt]]:
    """`(on the line, abandoned)`, each newest first."""
    line = list(walk(attempts, launches, parent_of))
    on_line = set(line)
    abandoned = [attempt for attempt in attempts if attempt not in on_line]
    abandoned.sort(key=_age, reverse=True)
    return line, abandoned
