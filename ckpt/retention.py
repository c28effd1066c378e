"""Retention: which checkpoints a policy lets go, and deleting those, and only those, safely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckpt.checkpoint import Checkpoint, Fact
from ckpt.commit import uncommitted
from ckpt.discover import newest_valid
from ckpt.errors import CheckpointError, Corrupt, NotCommitted
from ckpt.fence import assert_not_fenced
from ckpt.names import DOOMED, MANIFEST, parse_attempt, part_rank
from ckpt.pins import pinned
from ckpt.run import Run, open_run
from ckpt.store import Store


class KeepPolicy(Protocol):
    """What decides over keeping: names those of a history, newest first, that are to stay."""

    def keep(self, history: Sequence[Fact]) -> set[str]:
        """The attempts to keep."""


def doomed(history: Sequence[Fact], keep: KeepPolicy | None, pinned: set[str]) -> list[str]:
    """The attempts that may go, oldest first: not kept by the policy, not pinned, and never the newest.

    `history` is newest first. No policy (None) keeps all.
    """
    if keep is None or not history:
        return []
    stay = keep.keep(history) | pinned | {history[0].attempt}
    return [fact.attempt for fact in reversed(history) if fact.attempt not in stay]


def orphans(run: Run, launch: int) -> list[str]:
    """Attempts of launches older than `launch` that were never committed. Raises StorageError."""
    return uncommitted(run.store, launch)


def prune(store: Store, attempts: Sequence[str], launch: int) -> list[str]:
    """Delete attempts of the run in `store`, in the name of launch `launch`; what could not be deleted, as
    texts.

    Whatever is asked for, it never deletes the newest valid checkpoint, a pinned one, one that belongs to
    another run, a damaged one, or an attempt that isn't committed and not older than `launch`. Raises Fenced
    if a newer launch owns the run.
    """
    run = open_run(store.uri, create=False)
    assert_not_fenced(store, launch)
    newest = newest_valid(run, quick=True, say=lambda _: None)
    there = {entry.name for entry in store.list() if entry.is_dir}
    warnings = []
    for attempt in attempts:
        if attempt not in there:
            continue
        reason = _reason_to_keep(run, attempt, launch, newest)
        if reason is None:
            reason = _delete(store, attempt)
        if reason is not None:
            warnings.append(f"{attempt} is not deleted: {reason}")
    return warnings


def _reason_to_keep(run: Run, attempt: str, launch: int, newest: Checkpoint | None) -> str | None:
    named = parse_attempt(attempt)
    if named is None:
        return "it is not the name of an attempt at a checkpoint"
    if newest is not None and attempt == newest.attempt:
        return "it is the newest valid checkpoint"
    try:
        Checkpoint(run.uri, attempt, *named, run_id=run.id).manifest  # noqa: B018
    except NotCommitted:
        if named[1] < launch or run.store.size(f"{attempt}/{DOOMED}") is not None:
            return None
        return "it is not committed, and its launch may still be writing it"
    except CheckpointError as error:
        return str(error)
    return None


def _delete(store: Store, attempt: str) -> str | None:
    mark = f"{attempt}/{DOOMED}"
    try:
        # The mark comes before the look for pins; see `ckpt.pins.pin`. It also keeps an attempt whose
        # deletion was interrupted from being committed again.
        store.put(mark, b"{}", durable=False)
        if attempt in pinned(store):
            store.delete(mark)
            return "it is pinned"
        store.delete(f"{attempt}/{MANIFEST}")
        for entry in store.list(attempt):
            if part_rank(entry.name) is not None:
                store.delete(f"{attempt}/{entry.name}")
        store.delete_tree(attempt)
    except Corrupt as error:
        store.delete(mark)
        return str(error)
    except CheckpointError as error:
        return str(error)
    return None
