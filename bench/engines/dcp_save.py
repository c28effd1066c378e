"""`torch.distributed.checkpoint.save`, which blocks and fsyncs."""

from __future__ import annotations

import time

import torch.distributed.checkpoint as dcp

from bench.engines import dcp_storage
from bench.engines.base import Peer
from bench.places import Place
from bench.workload import Workload


class DcpSave(Peer):
    """The reference that ratios are given to."""

    title = "dcp.save"

    def prepare(self, work: Workload, folder: Place) -> None:
        """Remember where and what."""
        super().prepare(work, folder)
        self.title += dcp_storage.way(folder)

    def save(self, step: int) -> None:
        """Write the checkpoint."""
        dcp.save(self.work.tensors(), no_dist=True, **dcp_storage.saving(self.place(step)))
        self.finished = time.monotonic()

    def load(self, step: int, target: Workload) -> None:
        """Load in place."""
        dcp_storage.load(self.place(step), target)

    def discard(self, step: int) -> None:
        """Remove what was saved."""
        dcp_storage.remove(self.place(step))
