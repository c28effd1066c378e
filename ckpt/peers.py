"""Ranks that do something together: what one of them raises, all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpt import errors
from ckpt.errors import CheckpointError, Corrupt, StorageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Peers"]

T = TypeVar("T")


class _Failure(NamedTuple):
    """An error as plain text, because not every exception can travel to another process."""

    rank: int
    kind: str
    text: str

    @property
    def about_storage(self) -> bool:
        return self.kind in (Corrupt.__name__, StorageError.__name__)


class Peers:
    """The ranks of a process group (on which CPU objects can travel), or one process by itself."""

    def __init__(self, group: ProcessGroup | None, rank: int) -> None:
        self.rank = rank
        self._group = group

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._group.size() if self._group is not None else 1

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. Raises CheckpointError if a rank is gone."""
        if self._group is None:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except Exception as error:
            raise CheckpointError(
                f"rank {self.rank} lost the other ranks while restoring: {error}"
            ) from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Do the work on every rank. If it fails on any, the same error is raised on all."""
        result, error = _attempt(work)
        failures = [f for f in self.gather(_failure(self.rank, error)) if f is not None]
        if failures:
            # One that can't be helped by another checkpoint goes before one that can: all ranks must agree.
            self._raise(min(failures, key=lambda f: (f.about_storage, f.rank)), error)
        return result  # type: ignore[return-value]

    def lead(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work; all ranks return its result (plain data), or raise its error."""
        result, error = _attempt(work) if self.rank == 0 else (None, None)
        outcome = self.gather((result, _failure(0, error)))[0]
        if outcome[1] is not None:
            self._raise(outcome[1], error)
        return outcome[0]  # type: ignore[return-value]

    def same(self, values: Sequence[str], what: str) -> None:
        """Raise CheckpointError, on all ranks, if any rank has other values than rank 0."""
        found = self.gather(tuple(values))
        other = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if other:
            raise CheckpointError(f"{what}: rank 0 has {found[0]}, rank {other[0]} has {found[other[0]]}")

    def _raise(self, failure: _Failure, own: Exception | None) -> None:
        if own is not None and failure.rank == self.rank:
            raise own
        kind = getattr(errors, failure.kind, CheckpointError)
        raise kind(f"rank {failure.rank}: {failure.text}")


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _failure(rank: int, error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    kind, text = type(error).__name__, str(error)
    return _Failure(rank, kind, text if isinstance(error, CheckpointError) else f"{kind}: {text}")
