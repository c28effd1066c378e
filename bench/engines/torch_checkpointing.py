"""Meta's `torch_checkpointing`, if it is installed."""

from __future__ import annotations

from typing import Any

from bench.engines.base import Absent, InFuture
from bench.places import Place
from bench.workload import Workload

try:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError as error:
    raise Absent(f"torch_checkpointing is not installed ({error})") from error


class TorchCheckpointing(InFuture):
    """Staged in the background, written by a process of its own."""

    title = "torch_checkpointing"
    note = "does not fsync: durable is when it says so"
    _items = ("model", "optim")

    def prepare(self, work: Workload, folder: Place) -> None:
        """Make the manager and its staging buffers."""
        super().prepare(work, folder)
        # Its O_DIRECT writes fail on ext4: the length of a file's end is no multiple of a block.
        self._manager: Any = CheckpointManager(
            CheckpointManager.Config(
                items={name: ItemSpec() for name in self._items},
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._manager.prewarm_staging(self._payload(work))

    def before_step(self) -> None:
        """Return when the state is staged."""
        with self._manager.lock():
            pass

    def save(self, step: int) -> None:
        """Begin a save."""
        self.follow(self._manager.save(str(self.place(step)), self._payload(self.work)))

    def load(self, step: int, target: Workload) -> None:
        """Load into the live tensors."""
        self._manager.load(str(self.place(step)), into=self._payload(target), strict=True)

    def close(self) -> None:
        """End the writer process."""
        self._manager.close()

    def _payload(self, work: Workload) -> dict[str, Any]:
        tensors = work.tensors()
        return {
            item: {name: value for name, value in tensors.items() if name.startswith(f"{item}.")}
            for item in self._items
        }
