"""The plainest copy of a state that there is: all tensors at once into memory that is there already."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from bench.workload import Workload
from ckpt import huge_pages

_ALIGN = 64


class Copier:
    """Copies all tensors of `work` in a background thread; on CUDA on a stream of its own.

    copies: where to, in the order of `work.tensors()`.
    """

    def __init__(self, work: Workload) -> None:
        self._sources = list(work.tensors().values())
        self._cuda = work.device.type == "cuda"
        self.copies = _targets(self._sources, self._cuda)
        self._thread = ThreadPoolExecutor(1, "raw-copy")
        self._copying: Future[None] | None = None
        self._seconds = 0.0
        if self._cuda:
            self._stream = torch.cuda.Stream(work.device)
            self._begun = torch.cuda.Event(enable_timing=True)
            self._done = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Begin to copy the state as it is now. It must not change before `join`."""
        if self._cuda:
            self._begun.record()
        self._copying = self._thread.submit(self._copy)

    def join(self) -> None:
        """Return when the state may change; on CUDA the training stream waits, not the host."""
        if self._copying is not None:
            self._copying.result()
            self._copying = None
            if self._cuda:
                torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> float:
        """Return when all is copied; the seconds that the last copy took."""
        self.join()
        if self._cuda:
            self._done.synchronize()
            return float(self._begun.elapsed_time(self._done)) / 1e3
        return self._seconds

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _copy(self) -> None:
        with torch.no_grad():
            if not self._cuda:
                start = time.monotonic()
                torch._foreach_copy_(self.copies, self._sources)
                self._seconds = time.monotonic() - start
                return
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._begun)
                torch._foreach_copy_(self.copies, self._sources, non_blocking=True)
                self._done.record()


def _targets(sources: list[Tensor], pinned: bool) -> list[Tensor]:
    room = [-(-source.nbytes // _ALIGN) * _ALIGN for source in sources]
    if pinned:
        flat = torch.zeros(sum(room), dtype=torch.uint8, pin_memory=True)
    else:
        flat = torch.frombuffer(huge_pages.private_memory(sum(room)), dtype=torch.uint8).zero_()
    pieces = flat.split(room)
    return [
        piece[: source.nbytes].view(source.dtype).view(source.shape)
        for piece, source in zip(pieces, sources, strict=True)
    ]
