"""Two gloo ranks, each a process of its own, that run functions of tests one after the other."""

import json
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ckpt import faults


def _serve(rank, world_size, meet, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    while (job := pipe.recv()) is not None:
        work, args, rules = job
        os.environ[faults.VARIABLE] = json.dumps(rules)
        faults._rules = faults.parse(json.dumps(rules))
        try:
            result = (True, work(rank, *args))
            dist.barrier()
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send(result)
    dist.destroy_process_group()


class Ranks:
    """`run` calls `work(rank, *args)` on every rank; after a failure the ranks are of no more use."""

    def __init__(self, world_size, folder):
        context = mp.get_context("spawn")
        self._pipes = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, f"{folder}/meet", theirs))
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, work, *args, faults_of=None, timeout=60):
        """What each rank returned. `faults_of[rank]` are the fault rules of that rank and its writers."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((work, args, (faults_of or {}).get(rank, [])))
        results = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(timeout), f"rank {rank} did not end in time"
            results.append(pipe.recv())
        wrong = [result for fine, result in results if not fine]
        assert not wrong, "\n".join(wrong)
        return [result for _, result in results]

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
