"""How a launch ended, as far as its manager can tell when it is closed."""

from __future__ import annotations

import sys
from dataclasses import dataclass


def unless_success(error: BaseException | None) -> BaseException | None:
    """`error`, or None if it only ends the process with success."""
    return None if isinstance(error, SystemExit) and not error.code else error


@dataclass
class EndAs:
    """What closing does: whether it saves, what it records, and what it tells people, if anything."""

    save: bool
    outcome: str
    cause: str | None = None
    complaint: str = ""

    def failed(self, cause: str) -> None:
        """Saving has failed; what went wrong before stays the cause."""
        if self.cause is None:
            self.outcome, self.cause = "failed", cause


class Ending:
    """Made with the manager: an exception that is being handled by then has nothing to do with its launch."""

    def __init__(self) -> None:
        # Its id only: the traceback keeps everything alive that the failed code had in its hands.
        self._handled = id(sys.exc_info()[1])

    def foresee(self, save: bool, moved: bool, named: bool) -> EndAs:
        """How to end if closing is asked to `save` a state that has `moved` since its step or not, and
        that the caller has `named` or not.

        An interrupt or an exit is somebody's wish to stop; any other exception is a failure, and what it
        left of a state that has moved is of no step.
        """
        error = unless_success(sys.exc_info()[1])
        if error is None or id(error) == self._handled:
            end = EndAs(save, "finished" if save else "preempted")
        else:
            cause = f"{type(error).__name__}: {error}".rstrip(": ")
            end = EndAs(save, "failed" if isinstance(error, Exception) else "preempted", cause)
        if save and moved and (end.cause is not None or not named):
            end.save = False
            end.complaint = (
                "an optimizer has moved: that state is not saved. Call step() after every update, or "
                "close(final_step=...)"
            )
            if end.cause is None:
                end.outcome, end.cause = "preempted", "closed after an update that no step() was called for"
        return end
