"""State entries of the loop's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Progress:
    """How far the run is.

    ``step`` counts optimizer updates done, ``samples`` the training samples they used over all ranks (which
    is the position in the data), ``evaluated`` is the step of the last finished evaluation (-1: none).
    """

    def __init__(self) -> None:
        self.step = 0
        self.samples = 0
        self.evaluated = -1

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return {"step": self.step, "samples": self.samples, "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the counters over."""
        self.step, self.samples, self.evaluated = state["step"], state["samples"], state["evaluated"]


class DataIdentity:
    """Which data the run is trained on; another one on resume is named, for then samples are not the same."""

    def __init__(self, identity: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._identity = dict(identity)
        self._say = say

    def state_dict(self) -> dict[str, Any]:
        """The plain values that tell this data from any other."""
        return dict(self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with what the checkpoint was trained on."""
        names = sorted({*state, *self._identity})
        changed = [name for name in names if state.get(name) != self._identity.get(name)]
        if changed:
            listed = "; ".join(f"{n} was {state.get(n)!r}, is {self._identity.get(n)!r}" for n in changed)
            self._say(
                f"the data is not what this run was trained on: {listed}. It goes on with other samples"
            )
