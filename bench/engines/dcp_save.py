"""`torch.distributed.checkpoint.save`, which blocks and fsyncs."""

from __future__ import annotations

import time

import torch.distributed.checkpoint as dcp

from bench.engines.base import Peer
from bench.workload import Workload


class DcpSave(Peer):
    """The reference that ratios are given to."""

    title = "dcp.save"

    def save(self, step: int) -> None:
        """Write the checkpoint."""
        dcp.save(self.work.tensors(), checkpoint_id=self.place(step), no_dist=True)
        self.finished = time.monotonic()

    def load(self, step: int, target: Workload) -> None:
        """Load in place."""
        dcp.load(dict(target.tensors()), checkpoint_id=self.place(step), no_dist=True)
