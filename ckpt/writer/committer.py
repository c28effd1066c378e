"""Rank 0's writer commits and prunes, also in the place of a trainer that has died."""

import time
from collections.abc import Callable

from ckpt import commit, names, retention
from ckpt.digest import DEFAULT, chunk_digest
from ckpt.errors import CheckpointError, Fenced, StorageError
from ckpt.fence import assert_launched, assert_not_fenced
from ckpt.run import Run, open_run
from ckpt.writer.retry import errno_of, retrying

_POLL_FIRST_S = 0.05
_POLL_LAST_S = 1.0


class Committer:
    """Commits attempts of one launch and prunes; `tell` sends an event to the trainer, if it still lives."""

    def __init__(self, uri: str, launch: int, retry_s: float, tell: Callable[..., None]) -> None:
        self._uri = uri
        self._launch = launch
        self._retry_s = retry_s
        self._tell = tell
        self._opened: Run | None = None

    @property
    def _run(self) -> Run:
        if self._opened is None:
            self._opened = open_run(self._uri, create=False)
        return self._opened

    def commit(self, attempt: str, world_size: int) -> bool:
        """Commit an attempt whose parts are all durable; the outcome is told as an event, and returned."""
        try:
            digest = retrying(lambda: self._commit(attempt, world_size), self._retry_s, time.sleep)
        except Fenced as error:
            self._tell("fenced", attempt=attempt, by=str(error))
        except Exception as error:
            self._tell(
                "failed", attempt=attempt, phase="commit", error=f"{attempt}: {error}", errno=errno_of(error)
            )
        else:
            self._tell("committed", attempt=attempt, digest=digest, t=time.monotonic())
            return True
        return False

    def commit_when_whole(self, attempt: str, world_size: int, deadline: float) -> None:
        """Commit once every rank's part is there, if that happens before `deadline` (monotonic seconds)."""
        poll = _POLL_FIRST_S
        wanted = {names.part_name(rank) for rank in range(world_size)}
        while True:
            try:
                assert_not_fenced(self._run.store, self._launch)
                found = {entry.name for entry in self._run.store.list(attempt)}
            except Fenced as error:
                self._tell("fenced", attempt=attempt, by=str(error))
                return
            except StorageError:
                found = set()
            if names.MANIFEST in found:
                return
            if wanted <= found:
                self.commit(attempt, world_size)
                return
            if time.monotonic() + poll > deadline:
                return
            time.sleep(poll)
            poll = min(_POLL_LAST_S, poll * 1.5)

    def clear(self, attempt: str) -> None:
        """Remove all of a void attempt, also what other ranks left there; one that is committed stays."""
        store = self._run.store
        try:
            assert_not_fenced(store, self._launch)
            if store.size(f"{attempt}/{names.MANIFEST}") is None:
                store.delete(
                    f"{attempt}/{names.part_name(0)}"
                )  # first: without it nobody can commit the rest
                store.delete_tree(attempt)
        except CheckpointError as error:
            self._tell("notice", text=f"{attempt} is void, but its files could not be removed: {error}")

    def prune(self, attempts: list[str]) -> None:
        """Delete attempts; what could not be deleted is told as warnings."""
        try:
            assert_launched(self._run.store, self._launch)
            warnings = list(retention.prune(self._run.store, attempts, self._launch))
        except Exception as error:
            warnings = [f"could not prune: {error}"]
        self._tell("pruned", attempts=attempts, warnings=warnings)

    def _commit(self, attempt: str, world_size: int) -> str:
        run = self._run
        assert_launched(run.store, self._launch)
        made = commit.commit(run.store, attempt, world_size, self._launch, run.id, run.signing_key)
        return chunk_digest(DEFAULT, made.manifest.raw)
