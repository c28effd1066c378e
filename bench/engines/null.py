"""Saves nothing: what the measurement itself costs."""

from __future__ import annotations

import time

from bench.engines.base import Peer
from bench.workload import Workload


class Null(Peer):
    """The engine against which noise and memory are judged."""

    title = "nothing saved"

    def save(self, step: int) -> None:  # noqa: ARG002
        """Do nothing."""
        self.finished = time.monotonic()

    def load(self, step: int, target: Workload) -> None:
        """There is nothing to load."""
        raise NotImplementedError("nothing was saved")
