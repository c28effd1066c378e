"""`torch.distributed.checkpoint.async_save` in its three ways."""

from __future__ import annotations

from concurrent.futures import Future

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from bench.engines import dcp_storage
from bench.engines.base import WAIT_S, InFuture
from bench.places import Place
from bench.workload import Workload


class Thread(InFuture):
    """Staged at the call, written by a thread."""

    title = "dcp.async_save, thread"
    kind = AsyncCheckpointerType.THREAD
    _stager: DefaultStager | None = None
    _staging: Future[None] | None = None

    def prepare(self, work: Workload, folder: Place) -> None:
        """Make a process group of one, which a writer process asks for."""
        super().prepare(work, folder)
        self.title += dcp_storage.way(folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self, step: int) -> None:
        """Begin a save."""
        answer = dcp.async_save(
            self.work.tensors(),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            **dcp_storage.saving(self.place(step)),
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staging = answer.staging_completion
            self.follow(answer.upload_completion)
        else:
            self.follow(answer)

    def before_step(self) -> None:
        """Return when the state is staged."""
        if self._staging is not None:
            self._staging.result(WAIT_S)
            self._staging = None

    def load(self, step: int, target: Workload) -> None:
        """Load in place."""
        dcp_storage.load(self.place(step), target)

    def discard(self, step: int) -> None:
        """Remove what was saved."""
        dcp_storage.remove(self.place(step))

    def close(self) -> None:
        """Wait for the last save and end the group."""
        super().close()
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class Staged(Thread):
    """Staged in the background into buffers that are kept, written by a thread."""

    title = "dcp.async_save, DefaultStager"
    shared = False

    def prepare(self, work: Workload, folder: Place) -> None:
        """Make the stager."""
        super().prepare(work, folder)
        cuda = work.device.type == "cuda"
        # Pinned memory and copies that don't block are refused without a GPU.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self.shared,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )


class Process(Staged):
    """Staged in the background into shared memory, written by a process."""

    title = "dcp.async_save, process"
    kind = AsyncCheckpointerType.PROCESS
    shared = True
