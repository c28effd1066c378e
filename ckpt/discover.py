"""Finding checkpoints: which there are, in which order, and the newest that proves valid."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.errors import CheckpointError, Corrupt, NotCommitted, StateError, StorageError
from ckpt.fence import launch_numbers
from ckpt.launches import read_parent
from ckpt.lineage import Attempt, order, walk
from ckpt.names import MANIFEST, parse_attempt
from ckpt.run import Run, open_run
from ckpt.store import Store
from ckpt.verification import verify as verify_one

_LOG = logging.getLogger("ckpt")
_THREADS = 16
_MAX_NAMED = 8
_MAX_DIGITS = 100
_RETRY_PAUSES_S = (0.2, 1.0)

Say = Callable[[str], None]


def attempts_of(store: Store) -> list[Attempt]:
    """All attempts in a run, committed or not, at the price of one listing. Raises StorageError."""
    found = []
    for entry in store.list():
        named = parse_attempt(entry.name) if entry.is_dir else None
        if named is not None:
            found.append(Attempt(entry.name, *named))
    return found


def checkpoints(uri: str) -> list[Checkpoint]:
    """The committed checkpoints of a run: those on its line newest first, then abandoned ones, newest first.

    They are not verified. Raises NotCommitted if there is no run, StorageError.
    """
    return committed(open_run(uri, create=False))


def committed(run: Run) -> list[Checkpoint]:
    """As `checkpoints`, of an opened run."""
    parent_of = partial(read_parent, run.store)
    line, abandoned = order(attempts_of(run.store), launch_numbers(run.store), parent_of)
    listed = [_checkpoint(run, attempt) for attempt in line]
    listed += [_checkpoint(run, attempt, abandoned=True) for attempt in abandoned]
    with ThreadPoolExecutor(_THREADS) as pool:
        sizes = list(pool.map(lambda item: run.store.size(f"{item.attempt}/{MANIFEST}"), listed))
    return [item for item, size in zip(listed, sizes, strict=True) if size]


def candidates(run: Run) -> Iterator[Checkpoint]:
    """The attempts on the run's line, newest first, neither read nor verified. Raises StorageError."""
    for attempt in walk(attempts_of(run.store), launch_numbers(run.store), partial(read_parent, run.store)):
        yield _checkpoint(run, attempt)


def latest_valid(uri: str, verify: str = "full", say: Say | None = None) -> Checkpoint | None:
    """The newest checkpoint on the run's line that verifies, `full`y or `quick`ly; None if there is none at
    all.

    Each newer one that doesn't is named to `say` (default: a warning of the logger `ckpt`). Raises Corrupt if
    there are checkpoints but no valid one, NotCommitted if there is no run, NewerFormat, StorageError.
    """
    if verify not in ("full", "quick"):
        raise StateError(f"verify is 'full' or 'quick', not {verify!r}")
    return newest_valid(open_run(uri, create=False), quick=verify == "quick", say=say)


def newest_valid(run: Run, quick: bool, say: Say | None = None) -> Checkpoint | None:
    """As `latest_valid`, of an opened run."""
    tell = say or _LOG.warning
    bad = []
    for checkpoint in candidates(run):
        try:
            problem = problem_of(checkpoint, quick)
        except NotCommitted:
            tell(f"passing over {checkpoint.attempt}: it is not committed (a save killed or still under way)")
            continue
        if problem is None:
            return checkpoint
        tell(f"passing over {checkpoint.attempt}: {problem}")
        bad.append(checkpoint.attempt)
    if bad:
        named = ", ".join(bad[:_MAX_NAMED]) + (" and more" if len(bad) > _MAX_NAMED else "")
        raise Corrupt(
            f"no checkpoint of {run.uri} is valid: {named} failed the check (`python -m ckpt verify` says "
            f"why). Put back what is missing, or start a new run"
        )
    return None


def problem_of(checkpoint: Checkpoint, quick: bool) -> str | None:
    """Why a committed checkpoint can't be used; None if it verifies. Raises NotCommitted, NewerFormat."""
    for pause_s in (*_RETRY_PAUSES_S, None):
        try:
            checkpoint.manifest  # noqa: B018
            return "; ".join(verify_one(checkpoint, quick).problems) or None
        except Corrupt as error:
            return str(error)
        except StorageError as error:
            # Going back to an older checkpoint costs work: not for a storage that only stumbled.
            if pause_s is None:
                return str(error)
            time.sleep(pause_s)
    return None


def find(run: Run, which: str) -> Checkpoint:
    """The one checkpoint that `which` means; it is not verified, except for `latest`.

    `which` is `latest` (the newest valid, by sizes), `step:N`, an attempt's name, `tag:NAME` or
    `best:METRIC:min|max`. Raises NotCommitted, naming what there is instead, and StateError for a `which`
    that makes no sense.
    """
    kind, _, rest = which.partition(":")
    if which == "latest":
        newest = newest_valid(run, quick=True)
        if newest is None:
            raise NotCommitted(f"{run.uri} has no committed checkpoint yet")
        return newest
    if kind == "step" and rest.strip().isdecimal() and len(rest) < _MAX_DIGITS:
        return _one(run, lambda item: item.step == int(rest), f"step {int(rest)}")
    if kind == "best":
        return best(committed(run), *_metric_and_direction(rest))
    if kind == "tag" and rest:
        from ckpt.pins import read_pin

        pin = read_pin(run, rest)
        return _one(run, lambda item: item.attempt == pin.attempt, f"tag {rest}, {pin.attempt}")
    if parse_attempt(which):
        return _one(run, lambda item: item.attempt == which, which)
    raise StateError(
        f"{which!r} names no checkpoint: give latest, step:N, tag:NAME, best:METRIC:min, best:METRIC:max, "
        f"or the name of its folder (step-...)"
    )


def best(history: list[Checkpoint], metric: str, direction: str) -> Checkpoint:
    """The checkpoint on the line with the best finite value of a metric, of equal ones the newest.

    `direction` is `min` or `max`. NaN, infinities and missing values never win. Raises NotCommitted if no
    checkpoint has a finite value, StateError for another direction.
    """
    if direction not in ("min", "max"):
        raise StateError(f"the direction of {metric!r} is 'min' or 'max', not {direction!r}")
    line = [item for item in history if not item.abandoned]
    with ThreadPoolExecutor(_THREADS) as pool:
        metrics = list(pool.map(_metrics, line))
    scored = [
        (float(values[metric]), item)
        for values, item in zip(metrics, line, strict=True)
        if _is_finite(values.get(metric))
    ]
    if not scored:
        known = sorted({name for values in metrics for name in values})
        raise NotCommitted(
            f"there is no best checkpoint by {metric!r}: none has a finite value of it; metrics recorded are "
            f"{', '.join(known) or 'none'}"
        )
    pick = min if direction == "min" else max
    # The history is newest first, and min and max return the first of equals.
    return pick(scored, key=lambda pair: pair[0])[1]


def _metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return checkpoint.metrics
    except CheckpointError as error:
        _LOG.warning("passing over %s: %s", checkpoint.attempt, error)
        return {}


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _metric_and_direction(text: str) -> tuple[str, str]:
    metric, _, direction = text.rpartition(":")
    if not metric or direction not in ("min", "max"):
        raise StateError(
            f"'best:{text}' has to say which metric and whether low or high is good, as in best:val_loss:min"
        )
    return metric, direction


def _one(run: Run, wanted: Callable[[Checkpoint], bool], what: str) -> Checkpoint:
    listed = committed(run)
    found = [item for item in listed if wanted(item)]
    if found:
        return found[0]
    steps = [str(item.step) for item in listed][:20]
    raise NotCommitted(
        f"{run.uri} has no committed checkpoint for {what}; its steps are {', '.join(steps) or '(none)'}"
    )


def _checkpoint(run: Run, attempt: Attempt, abandoned: bool = False) -> Checkpoint:
    return Checkpoint(run.uri, attempt.name, attempt.step, attempt.launch, abandoned, run.id)
