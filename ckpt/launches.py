"""Launches: who writes to a run, in which order, from which checkpoint each went on, and how it ended."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt import liveness
from ckpt.checkpoint import Checkpoint
from ckpt.commit import posthumous
from ckpt.errors import RunBusy, StateError, StorageError
from ckpt.fence import MAX_RECORD, assert_not_fenced, launch_numbers, read_record
from ckpt.names import LAUNCHES, launch_file, launch_of, parse_attempt
from ckpt.run import Run
from ckpt.sealed import canonical
from ckpt.store import Store
from ckpt.values import encode

__all__ = [
    "Launch",
    "assert_not_fenced",
    "begin_launch",
    "launch_numbers",
    "list_launches",
    "parent_facts",
    "read_launch",
    "read_parent",
    "record_end",
    "record_parent",
]

OUTCOMES = ("finished", "preempted", "failed")
DRAIN_DEADLINE_S = 180.0
MAX_NUMBER = 999_999_999
_ORPHANS_LOOKED_AT = 8


@dataclass(frozen=True)
class Launch:
    """One launch; `info` is empty if its file is torn, `parent` and `end` are None where nothing was
    recorded.

    `parent` is `{"attempt", "step", "launch"}` of the checkpoint it restored, `{"uri", "attempt", "step"}` of
    one from another run, or `{"fresh": true}`; `end` is
    `{"outcome", "cause", "last_step", "ended"}`.
    """

    number: int
    info: dict[str, Any]
    parent: dict[str, Any] | None
    end: dict[str, Any] | None


def read_launch(store: Store, number: int) -> Launch:
    """One launch with all that was recorded of it. What can't be read counts as not recorded."""
    return Launch(
        number,
        read_record(store, launch_file(number)) or {},
        read_parent(store, number),
        read_record(store, launch_file(number, "end.json")),
    )


def read_parent(store: Store, number: int) -> dict[str, Any] | None:
    """What launch `number` recorded as the checkpoint it went on from."""
    return read_record(store, launch_file(number, "parent.json"))


def list_launches(store: Store) -> list[Launch]:
    """All launches, ascending. Raises StorageError."""
    return [read_launch(store, number) for number in launch_numbers(store)]


def begin_launch(
    run: Run,
    *,
    owner: str,
    config: Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None],
    watch_s: float = liveness.WATCH_S,
    drain_deadline_s: float = DRAIN_DEADLINE_S,
) -> Launch:
    """Become the one launch that may write to the run, and clear up after the ones before.

    A new launch fences all older ones. `owner` is a text that only restarts of the same launch share: they
    take over by themselves. Then an orphaned writer is waited for, and complete but uncommitted attempts are
    committed. Raises RunBusy if another launch lives and `run.takeover` is not set, Fenced if this one is
    overtaken meanwhile, StateError for a config that is not plain, StorageError.
    """
    info = {
        **liveness.identity(),
        "format": 1,
        "run_id": run.id,
        "owner": owner,
        "started": _now(),
        "config": encode(config, "config", ordered=False),
        "overrides": [str(item) for item in overrides],
    }
    size = len(canonical(info))
    if size > MAX_RECORD - 100:
        raise StateError(f"the config and overrides make {size} bytes of JSON, where {MAX_RECORD} are taken")
    if run.uri.startswith("memory://"):
        raise StorageError(
            f"{run.uri} is seen by only this process, and checkpoints are written by another one"
        )
    number = _take_number(run, info, watch_s, say)
    with liveness.beating(run.store, number):
        _wait_for_orphans(run.store, number, watch_s, drain_deadline_s, say)
        for attempt in posthumous(run, number, say=say):
            say(f"committed {attempt}, which was complete but for its manifest")
        _end_uploads(run.store, number, say)
    return Launch(number, info, None, None)


def _take_number(run: Run, info: dict[str, Any], watch_s: float, say: Callable[[str], None]) -> int:
    run.store.make_dir(LAUNCHES)
    while True:
        # Looked up before the last launch is judged: one that comes up meanwhile takes this number.
        number = _highest_used(run.store) + 1
        numbers = launch_numbers(run.store)
        last = numbers[-1] if numbers else 0
        if last:
            _refuse_if_live(run, read_launch(run.store, last), info["owner"], watch_s, say)
        if number > MAX_NUMBER:
            raise StorageError(f"{run.uri} holds launch number {number - 1}: there is no higher one to take")
        # Whoever creates the next number has won; the loser looks again and finds the winner alive.
        if run.store.create(launch_file(number), canonical({**info, "number": number})):
            return number


def _highest_used(store: Store) -> int:
    """The highest number that anything in the run bears: one whose launch file is lost is not used again."""
    attempts = (parse_attempt(entry.name) or (0, 0) for entry in store.list())
    return max(
        0, *(launch_of(entry.name) for entry in store.list(LAUNCHES)), *(launch for _, launch in attempts)
    )


def _refuse_if_live(run: Run, last: Launch, owner: str, watch_s: float, say: Callable[[str], None]) -> None:
    if run.takeover or (owner and last.info.get("owner") == owner):
        return
    found = liveness.is_live(
        run.store, last.number, last.info, ended=last.end is not None, watch_s=watch_s, say=say
    )
    if not found.live:
        return
    at = f", at step {found.step}" if found.step is not None else ""
    raise RunBusy(
        f"{run.uri} is being written to by launch {last.number} (host {found.host}, pid {found.pid}{at}; "
        f"{found.reason}): {_advice(found)}"
    )


def _advice(found: liveness.Liveness) -> str:
    if found.pid == os.getpid():
        return "that is this very process: close the manager that holds the run first"
    return "wait for it, stop it, choose another run, or take over with takeover=true"


def _wait_for_orphans(
    store: Store, number: int, watch_s: float, deadline_s: float, say: Callable[[str], None]
) -> None:
    older = [n for n in launch_numbers(store) if n < number]
    for launch in reversed(older[-_ORPHANS_LOOKED_AT:]):
        if liveness.process_alive(read_launch(store, launch).info):
            # Taken over while alive: its writer serves a trainer that will stop at its next save.
            continue
        if not liveness.wait_for_writer(store, launch, deadline_s=deadline_s, watch_s=watch_s, say=say):
            say(f"going on though the writer of launch {launch} has not ended: it is fenced, so can't commit")


def _end_uploads(store: Store, number: int, say: Callable[[str], None]) -> None:
    """Free what writers of older launches that were killed have uploaded in vain."""

    def older(key: str) -> bool:
        named = parse_attempt(key.partition("/")[0])
        return named is not None and named[1] < number

    try:
        ended = store.abort_uploads(older)
    except StorageError as error:
        say(f"uploads that a killed writer may have left stay where they are: {error}")
        return
    if ended:
        say(f"ended {ended} unfinished uploads of earlier launches")


def record_parent(run: Run, launch: Launch, checkpoint: Checkpoint | None) -> None:
    """Record, once and for good, what the launch restored; None means that it started fresh.

    Raises StorageError if something else was recorded before.
    """
    content = {"fresh": True} if checkpoint is None else parent_facts(run, checkpoint)
    key = launch_file(launch.number, "parent.json")
    if not run.store.create(key, canonical(content)) and read_record(run.store, key) != content:
        raise StorageError(f"{run.uri}/{key} already records another checkpoint than {content}")


def parent_facts(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is recorded of the checkpoint that a launch of `run` restored.

    One from another run is named by its address alone: its launch number means nothing in this run's line.
    """
    if checkpoint.manifest.run_id != run.id:
        return {"uri": checkpoint.uri, "attempt": checkpoint.attempt, "step": checkpoint.step}
    return {"attempt": checkpoint.attempt, "step": checkpoint.step, "launch": checkpoint.launch}


def record_end(
    run: Run, launch: Launch, outcome: str, cause: str | None = None, last_step: int | None = None
) -> bool:
    """Record, once, how the launch ended: `finished`, `preempted` or `failed`, with its first cause.

    False if an end was recorded before, which then stands. Raises StorageError.
    """
    if outcome not in OUTCOMES:
        raise StorageError(f"a launch ends as one of {', '.join(OUTCOMES)}, not as {outcome!r}")
    cause = cause and cause[:100_000]
    content = {"outcome": outcome, "cause": cause, "last_step": last_step, "ended": _now()}
    return run.store.create(launch_file(launch.number, "end.json"), canonical(content))


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
