"""What only rank 0's writer does: the heartbeat, commits, and pruning, each in a thread of its own."""

from collections.abc import Callable

from ckpt.store import Store
from ckpt.writer.committer import Committer
from ckpt.writer.heart import Heart
from ckpt.writer.lane import Lane
from ckpt.writer.options import WriterOptions
from ckpt.writer.save import Save

_HEART_GRACE_S = 2.0


class Lead:
    """The leading writer's extra duties; every method returns at once, but `finish`."""

    def __init__(
        self,
        store: Store,
        launch: int,
        options: WriterOptions,
        tell: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self.heart = Heart(store, launch, options.beat_s, say)
        self._committer = Committer(store.uri, launch, options.retry_s, tell)
        self._commits = Lane("commit")
        self._prunes = Lane("prune")

    def commit(self, attempt: str, world_size: int, save: Save | None) -> None:
        """Commit an attempt whose parts are all durable."""

        def job() -> None:
            if self._committer.commit(attempt, world_size) and save is not None:
                save.committed = True

        self._commits.add(job)

    def commit_when_whole(self, save: Save, deadline: float) -> None:
        """In the dead trainer's place: commit once all parts are there, unless that has happened already."""
        world_size = int((save.part or {}).get("world_size", 1))

        def job() -> None:
            if not save.committed:
                self._committer.commit_when_whole(save.attempt, world_size, deadline)

        self._commits.add(job)

    def clear(self, attempt: str) -> None:
        """Remove all that any rank left of a void attempt; in the commits' thread, so never beside one."""
        self._commits.add(lambda: self._committer.clear(attempt))

    def prune(self, attempts: list[str]) -> None:
        """Delete attempts."""
        self._prunes.add(lambda: self._committer.prune(attempts))

    def finish(self) -> None:
        """Return when all commits and deletions asked for are done and the heart has stopped."""
        self._commits.finish()
        self._prunes.finish()
        self.heart.stop(timeout=_HEART_GRACE_S)
