"""Processes that prepare batches. What crosses between them and the trainer is JSON and raw tensor bytes."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe

import torch
from torch import Tensor

Task = Sequence[tuple[int, int]]  # (epoch, index) of each sample of a batch
Batch = dict[str, Tensor]

ALIGN = 16  # of each tensor in a message, enough for every dtype
PR_SET_PDEATHSIG = 1


class WorkerPool:
    """``count`` forked workers that turn tasks into batches by ``make``, each in the order it was given.

    Fork it before threads that hold locks run and before CUDA is used. Workers ignore SIGTERM and SIGINT,
    which are the trainer's to handle, and die with it whatever kills it.
    """

    def __init__(self, count: int, make: Callable[[Task], Batch], close_fds: Sequence[int] = ()) -> None:
        self.pids: list[int] = []
        self._pipes: list[Connection] = []
        self._given = 0
        self._taken = 0
        trainer = os.getpid()
        for _ in range(count):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                _run(theirs, make, trainer, [*close_fds, ours.fileno(), *(p.fileno() for p in self._pipes)])
            theirs.close()
            self.pids.append(pid)
            self._pipes.append(ours)

    @property
    def waiting(self) -> int:
        """Tasks given whose batches have not been taken."""
        return self._given - self._taken

    def give(self, task: Task) -> None:
        """Hand out the next task."""
        pipe = self._pipes[self._given % len(self._pipes)]
        try:
            pipe.send_bytes(json.dumps(task).encode())
        except OSError as error:
            raise self._lost(self._given % len(self._pipes)) from error
        self._given += 1

    def take(self) -> Batch:
        """The batch of the oldest task; waits for it. Raises RuntimeError if making it failed."""
        place = self._taken % len(self._pipes)
        try:
            head = json.loads(self._pipes[place].recv_bytes())
            if "error" in head:
                raise RuntimeError(f"a data worker failed: {head['error']}\n{head['trace']}")
            data = bytearray(head["size"])
            if data:
                self._pipes[place].recv_bytes_into(data)
        except (EOFError, OSError) as error:
            raise self._lost(place) from error
        self._taken += 1
        return unpack(head["tensors"], data)

    def close(self) -> None:
        """End the workers and wait for them."""
        for pipe in self._pipes:
            pipe.close()
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
        self.pids, self._pipes = [], []

    def _lost(self, place: int) -> RuntimeError:
        pid = self.pids[place]
        code = _exit_code(pid)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return RuntimeError(
            f"data worker {place} (pid {pid}) {how}; "
            "if memory ran out, lower trainer.workers or trainer.batch_size"
        )


def _exit_code(pid: int) -> int:
    """The exit code of a child that is about to end (negative: a signal), killing it after a second."""
    deadline = time.monotonic() + 1.0
    try:
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def pack(batch: Mapping[str, Tensor]) -> tuple[list[list[object]], bytes]:
    """Describe tensors as [name, dtype, shape, offset] and lay their bytes out one after the other."""
    listed: list[list[object]] = []
    data = bytearray()
    for name, tensor in batch.items():
        data.extend(bytes(-len(data) % ALIGN))
        listed.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(data)])
        if tensor.numel():
            data.extend(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return listed, bytes(data)


def unpack(listed: Sequence[Sequence], data: bytearray) -> Batch:
    """The inverse of ``pack``; the tensors share ``data``."""
    batch = {}
    for name, dtype_name, shape, offset in listed:
        dtype = getattr(torch, dtype_name)
        count = 1
        for length in shape:
            count *= length
        flat = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=dtype)
        )
        batch[name] = flat.view(shape)
    return batch


def _run(pipe: Connection, make: Callable[[Task], Batch], trainer: int, close_fds: Sequence[int]) -> None:
    """A worker's whole life; never returns into the trainer's code."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        # What the trainer left to be collected may need its threads in order to end, which are not here.
        gc.freeze()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != trainer:
            os._exit(0)  # it died before the line above took effect
        for fd in close_fds:
            if fd >= 0:
                os.close(fd)
        torch.set_num_threads(1)
        while True:
            task = json.loads(pipe.recv_bytes())
            try:
                listed, data = pack(make(task))
            except Exception as error:
                failure = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                pipe.send_bytes(json.dumps(failure).encode())
                continue
            pipe.send_bytes(json.dumps({"tensors": listed, "size": len(data)}).encode())
            if data:
                pipe.send_bytes(data)
    except (EOFError, OSError):
        os._exit(0)  # the trainer is gone or has closed the pipe
    finally:
        os._exit(1)
