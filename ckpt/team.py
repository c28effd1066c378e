"""The ranks of one launch as one of them sees them, and the team of one.

Rank 0 decides, one step ahead; every other rank's facts reach it as reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OK = "ok"


class Decision(NamedTuple):
    """What all ranks do at one call of `step`.

    token: begin a save whose attempt's name ends so. replan: look at the state's structure anew
    first. stop: stop training after this step. error: raise this
    (the name of a class in `ckpt.errors`, and the text).
    """

    token: str | None = None
    replan: bool = False
    stop: bool = False
    error: tuple[str, str] | None = None


class Team(Protocol):
    """The ranks of a launch, as seen by one of them."""

    rank: int
    world_size: int
    group: ProcessGroup | None

    def decide(self, call: int, now: Callable[[], Decision], ahead: Callable[[], Decision], /) -> Decision:
        """The decision for call number `call`; `now` and `ahead` (for the next call) are asked on rank
        0 only.
        """

    def share(self, name: str, make: Callable[[], Any], /) -> Any:
        """What `make` returned on rank 0 (plain JSON), on every rank; `name` is unique within the launch."""

    def ask_stop(self) -> None:
        """Let rank 0 know that this rank was asked to stop. Safe in a signal handler."""

    def stop_asked(self) -> bool:
        """Rank 0: whether any rank was asked to stop."""

    def report(self, attempt: str, text: str) -> None:
        """Tell rank 0 how an attempt went here: `OK` or what went wrong."""

    def reports(self, attempt: str) -> dict[int, str]:
        """Rank 0: the reports so far."""

    def publish_verdict(self, attempt: str, text: str) -> None:
        """Rank 0: tell all ranks how an attempt ended."""

    def verdict(self, attempt: str) -> str | None:
        """How rank 0 says an attempt ended, None if it has not said so yet."""

    def release(self, attempt: str) -> None:
        """This rank has cleared an attempt away and could begin another."""

    def released(self, attempt: str, /) -> bool:
        """Rank 0: whether all ranks have."""

    def close(self) -> None:
        """Leave the team."""


class Solo:
    """A team of one."""

    rank = 0
    world_size = 1
    group: ProcessGroup | None = None

    def __init__(self) -> None:
        self._stop = False
        self._reports: dict[str, str] = {}
        self._verdicts: dict[str, str] = {}

    def decide(self, _call: int, now: Callable[[], Decision], _ahead: Callable[[], Decision]) -> Decision:
        """Decide now."""
        return now()

    def share(self, _name: str, make: Callable[[], Any]) -> Any:
        """Nobody to share with."""
        return make()

    def ask_stop(self) -> None:
        """Remember it."""
        self._stop = True

    def stop_asked(self) -> bool:
        """Whether it was asked for."""
        return self._stop

    def report(self, attempt: str, text: str) -> None:
        """Remember it."""
        self._reports[attempt] = text

    def reports(self, attempt: str) -> dict[int, str]:
        """The own report, if any."""
        return {0: self._reports[attempt]} if attempt in self._reports else {}

    def publish_verdict(self, attempt: str, text: str) -> None:
        """Remember it."""
        self._verdicts[attempt] = text

    def verdict(self, attempt: str) -> str | None:
        """The own verdict."""
        return self._verdicts.get(attempt)

    def release(self, attempt: str) -> None:
        """Forget the attempt."""
        self._reports.pop(attempt, None)
        self._verdicts.pop(attempt, None)

    def released(self, _attempt: str) -> bool:
        """Always: there is nobody else."""
        return True

    def close(self) -> None:
        """Nothing to leave."""
