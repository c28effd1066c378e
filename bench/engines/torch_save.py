"""`torch.save` made durable: the file and its folder are fsynced."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from bench.engines.base import Peer
from bench.workload import Workload


class TorchSave(Peer):
    """Blocks until all is on storage."""

    title = "torch.save + fsync"

    def save(self, step: int) -> None:
        """Write the file."""
        place = Path(str(self.place(step)))
        place.mkdir()
        with (place / "state.pt").open("wb") as file:
            torch.save(self.work.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.finished = time.monotonic()

    def load(self, step: int, target: Workload) -> None:
        """Read the file and copy into the live tensors."""
        loaded = torch.load(Path(str(self.place(step)), "state.pt"), weights_only=True)
        with torch.no_grad():
            for name, tensor in target.tensors().items():
                tensor.copy_(loaded[name])
