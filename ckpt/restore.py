"""Bring a live training state to a checkpoint's: choose, read and check all, and only then touch the state.

On several ranks, rank 0 alone looks for the checkpoint and hands its manifest to the others; what fails on
one rank fails on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.checkpoint import Checkpoint
from ckpt.differences import Difference, report
from ckpt.digest import DEFAULT, chunk_digest
from ckpt.discover import candidates, committed, find, problem_of
from ckpt.errors import Corrupt, NotCommitted, StateError, StorageError
from ckpt.flatten import Flat, flatten
from ckpt.manifest import parse_manifest
from ckpt.names import split_checkpoint
from ckpt.peers import Peers
from ckpt.restore_match import match_state
from ckpt.restore_plan import RestorePlan
from ckpt.run import Run, open_run
from ckpt.sealed import signing_key
from ckpt.store import open_store
from ckpt.verification import as_checkpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["restore_into"]

_LOG = logging.getLogger("ckpt")

Say = Callable[[str], None]
OnSkip = Callable[[Checkpoint, str], None]


def restore_into(
    run: Run,
    state: Mapping[str, Any],
    rank: int = 0,
    process_group: ProcessGroup | None = None,
    which: str = "latest",
    say: Say | None = None,
    partial: bool = False,
    on_skip: OnSkip | None = None,
    threads: int = 4,
) -> Checkpoint | None:
    """Restore `state` from a checkpoint of the run; returns it, or None if the run has none at all.

    `which` is `latest`, `fresh` (refused unless the run is empty), what `ckpt.discover.find` takes, or the
    address of a run or checkpoint elsewhere, which is only read. Where a run is searched for its newest, a
    candidate that turns out damaged, even while it is read, is passed over (on rank 0, `say` and `on_skip`
    are told) and never deleted; if none is left, that is an error.

    With a process group (on which CPU objects can travel) this is a collective: all ranks call it with the
    same arguments and states of the same structure, however many ranks saved the checkpoint and however
    they had sharded it.

    Tensors keep their identity and memory; optimizer slots that don't exist yet are made. Every byte has
    been compared with its digest before the first one reaches the state, so any error before that leaves it
    untouched. Peak memory beside the state: one copy of this rank's part of those tensors that exist
    already, plus `threads` times 16 MiB; freed on return. With `partial`, what differs is left as it is and
    listed to `say` (default: a warning of the logger `ckpt`).

    Raises StateError with all differences between state and checkpoint in one list, or naming an object
    that refused its state; Corrupt if there are checkpoints but no valid one; NotCommitted if what was
    asked for does not exist; NewerFormat; StorageError.
    """
    peers = Peers(process_group, rank)
    tell = (say or _LOG.warning) if rank == 0 else _say_nothing
    flat = peers.together(lambda: flatten(state, rank))
    peers.same([run.id], f"the ranks opened different runs as {run.uri}")
    search = _Search(run, which, tell, on_skip if rank == 0 else None)
    while True:
        choice = peers.lead(search.next)
        if choice is None:
            return None
        checkpoint = search.chosen or _received(choice)
        peers.same([chunk_digest(DEFAULT, choice.raw), checkpoint.uri], "the ranks hold different manifests")
        try:
            plan = _prepared(peers, checkpoint, state, flat, partial, tell, threads)
        except (Corrupt, StorageError) as error:
            search.pass_over(checkpoint, str(error))
            continue
        _settle(peers, checkpoint, plan.unequal(), partial, tell)
        peers.together(plan.apply)
        return checkpoint


def _prepared(
    peers: Peers,
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    flat: Flat,
    partial: bool,
    tell: Say,
    threads: int,
) -> RestorePlan:
    """The plan with everything read and checked. Raises Corrupt or StorageError for a bad checkpoint."""
    plan = peers.together(lambda: match_state(checkpoint.manifest, state, flat, peers.rank, peers.world_size))
    for notes in peers.gather(plan.notes):
        for note in notes:
            tell(note)
    _settle(peers, checkpoint, plan.differences, partial, tell)
    peers.together(lambda: plan.read(checkpoint.store, threads))
    return plan


class _Choice(NamedTuple):
    """A checkpoint as it travels between ranks: the fields of its handle, and its manifest's bytes."""

    handle: tuple[str, str, int, int, bool, str | None]
    raw: bytes


def _received(choice: _Choice) -> Checkpoint:
    """The chosen checkpoint, with the manifest that rank 0 read: no other rank looks at storage for it."""
    checkpoint = Checkpoint(*choice.handle)
    vars(checkpoint)["manifest"] = parse_manifest(choice.raw, signing_key(), f"{checkpoint.uri}'s manifest")
    return checkpoint


class _Search:
    """Rank 0's way through the candidates; the others only keep the list of those passed over.

    `chosen` is what `next` came to last.
    """

    def __init__(self, run: Run, which: str, tell: Say, on_skip: OnSkip | None) -> None:
        self._run = run
        self._which = which
        self._tell = tell
        self._on_skip = on_skip
        self._bad: list[str] = []
        self._source: Iterator[Checkpoint] | None = None
        self._one_only = False
        self.chosen: Checkpoint | None = None

    def next(self) -> _Choice | None:
        """The next candidate that looks whole; None if there has never been any.

        Raises Corrupt, naming each, if all of them are bad.
        """
        if self._source is None:
            found = self._candidates()
            self._source, self._one_only = iter(found), isinstance(found, list)
        for checkpoint in self._source:
            try:
                problem = problem_of(checkpoint, quick=True)
            except NotCommitted:
                if self._one_only:
                    raise
                self._tell(f"passing over {checkpoint.attempt}: it was never committed")
                continue
            if problem is None:
                self.chosen = c = checkpoint
                handle = (c.run_uri, c.attempt, c.step, c.launch, c.abandoned, c.run_id)
                return _Choice(handle, c.manifest.raw)
            self.pass_over(checkpoint, problem)
        if self._bad:
            raise Corrupt(
                f"no checkpoint that was asked for ({self._which}) of {self._run.uri} can be restored:\n  "
                + "\n  ".join(self._bad)
                + "\nNothing was changed or deleted. Put back what is missing, name another checkpoint, "
                "or start a new run"
            )
        return None

    def pass_over(self, checkpoint: Checkpoint, reason: str) -> None:
        """Go on without this candidate."""
        self._bad.append(f"{checkpoint.attempt}: {reason}")
        self._tell(f"passing over {checkpoint.attempt}: {reason}")
        if self._on_skip is not None:
            self._on_skip(checkpoint, reason)

    def _candidates(self) -> Iterator[Checkpoint] | list[Checkpoint]:
        if self._which == "latest":
            return candidates(self._run)
        if self._which == "fresh":
            return _nothing(self._run)
        if _is_address(self._which):
            uri = open_store(self._which).uri
            if split_checkpoint(uri):
                return [as_checkpoint(uri)]
            return _at_least_one(candidates(open_run(uri, create=False)), uri)
        return [find(self._run, self._which)]


def _is_address(which: str) -> bool:
    return "/" in which and not which.startswith(("best:", "tag:", "step:"))


def _nothing(run: Run) -> list[Checkpoint]:
    """No candidates. Raises StateError if the run has checkpoints, which a fresh start would ignore."""
    there = [checkpoint.attempt for checkpoint in committed(run)]
    if there:
        raise StateError(
            f"{run.uri} has checkpoints ({', '.join(there[:5])}): start fresh in a new run, "
            "or restore with which='latest'"
        )
    return []


def _at_least_one(found: Iterator[Checkpoint], uri: str) -> Iterator[Checkpoint]:
    empty = True
    for checkpoint in found:
        empty = False
        yield checkpoint
    if empty:
        raise NotCommitted(f"the run {uri} has no checkpoint to restore from")


def _settle(
    peers: Peers, checkpoint: Checkpoint, own: Sequence[Difference], partial: bool, tell: Say
) -> None:
    """Refuse, or with `partial` name, what differs on any rank."""
    differences = {difference for found in peers.gather(list(own)) for difference in found}
    if not differences:
        return
    listed = f"{checkpoint.uri} and this state differ in {len(differences)} places:\n{report(differences)}"
    if not partial:
        raise StateError(
            f"{listed}\nNothing was changed. Make the state fit (model, optimizer and entries as they were "
            "saved), or ask for a partial restore, which leaves these as they are"
        )
    tell(f"{listed}\nThese stay as they are (partial restore)")


def _say_nothing(_: str) -> None:
    """Only rank 0 speaks."""
