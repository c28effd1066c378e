"""What the tests of the writer process share: runs, shards to save, and trainers that can be killed."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ckpt.arena import Arena
from ckpt.launches import begin_launch
from ckpt.layout import ShardLayout, Slice, plan_shard
from ckpt.run import Run, open_run
from ckpt.writer.client import WriterClient
from ckpt.writer.events import Event, Notice
from ckpt.writer.options import WriterOptions

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


def layout_of(mib: int, rank: int = 0) -> ShardLayout:
    """A shard of `mib` MiB of float32 and an odd tail, so that its last block is not a whole page."""
    big, tail = (mib * MIB // 4,), (77,)
    return plan_shard(
        [
            Slice(f"model.big{rank}", "float32", big, (0,), big),
            Slice(f"model.tail{rank}", "uint8", tail, (0,), tail),
        ]
    )


def part_of(run_id: str, attempt: str, rank: int = 0, world_size: int = 1, launch: int = 1) -> dict:
    lead = {
        "created": "2030-01-01T00:00:00+00:00",
        "metrics": {"loss": 0.5},
        "config": {"betas": (0.9, 0.99)},
    }
    return {
        "rank": rank,
        "world_size": world_size,
        "run_id": run_id,
        "attempt": attempt,
        "step": int(attempt.split("-")[1]),
        "launch": launch,
        "aliases": {},
        "values": {},
        "lead": lead if rank == 0 else None,
    }


def attempt_of(step: int, launch: int = 1) -> str:
    return f"step-{step:09d}-{launch:05d}-abcd"


def fill(arena: Arena, layout: ShardLayout, seed: int, upto: int | None = None) -> int:
    """Stage bytes that differ from save to save and page to page; the number of bytes staged."""
    end = layout.size if upto is None else min(upto, layout.size)
    start = len(layout.header)
    pattern = bytes((seed * 31 + i * 7 + (i >> 8)) & 0xFF for i in range(1 << 16))
    buffer = arena.buffer
    for at in range(start, end, len(pattern)):
        piece = min(len(pattern), end - at)
        buffer[at : at + piece] = pattern[:piece]
        if piece >= 8:
            buffer[at : at + 8] = at.to_bytes(8, "little")
    return end


class Saver:
    """A trainer's use of one writer, in this process: rank `rank` of a launch of a run."""

    def __init__(
        self, run: Run, mib: int = 20, rank: int = 0, world_size: int = 1, launch: int = 1, **options
    ):
        options.setdefault("beat_s", 0.2)
        self.run, self.rank, self.world_size, self.launch = run, rank, world_size, launch
        self.options = WriterOptions(**options)
        self.layout = layout_of(mib, rank)
        self.arena = Arena.create(self.layout.size)
        self.notices: list[str] = []
        self.start()

    def start(self) -> None:
        self.client = WriterClient.start(self.run.uri, self.rank, self.launch, options=self.options)
        self.client.attach(self.arena)

    def begin(self, step: int) -> str:
        attempt = attempt_of(step, self.launch)
        self.client.begin(attempt, self.layout, layout_changed=False)
        return attempt

    def stage(self, step: int, upto: int | None = None) -> None:
        self.client.progress(fill(self.arena, self.layout, step, upto))

    def seal(self, attempt: str) -> None:
        self.client.seal(part_of(self.run.id, attempt, self.rank, self.world_size, self.launch))

    def event(self, timeout: float = PATIENCE_S) -> Event:
        deadline = time.monotonic() + timeout
        while (event := self.client.next_event(max(0.0, deadline - time.monotonic()))) is not None:
            if not isinstance(event, Notice):
                return event
            self.notices.append(event.text)
        raise AssertionError(f"no event within {timeout} s")

    def save(self, step: int) -> tuple[str, Event]:
        """One whole save up to durable (or failed)."""
        attempt = self.begin(step)
        self.stage(step)
        self.seal(attempt)
        return attempt, self.event()

    def commit(self, attempt: str) -> Event:
        self.client.commit(attempt, self.world_size)
        return self.event()

    def bytes_of(self, attempt: str) -> bytes:
        return Path(self.run.uri, attempt, f"rank-{self.rank:05d}.safetensors").read_bytes()

    def close(self) -> None:
        self.client.close(PATIENCE_S)
        self.arena.close()


def new_run(path: Path) -> Run:
    run = open_run(str(path))
    begin_launch(run, owner="tests", config=None, say=print)
    return run


def files_in(run: Run) -> set[str]:
    """Every file of every attempt, as paths within the run."""
    return {str(found.relative_to(run.uri)) for found in Path(run.uri).glob("step-*/**/*") if found.is_file()}


def wait_until(true, what: str, timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Trainer:
    """A trainer in a process of its own (see `trainer_stub`), to be killed."""

    def __init__(self, run: Run, rank: int = 0, world_size: int = 1, shell: str = "", faults=(), **options):
        options.setdefault("beat_s", 0.2)
        settings = {
            "uri": run.uri,
            "run_id": run.id,
            "rank": rank,
            "world_size": world_size,
            "options": options,
        }
        command = [sys.executable, "-m", "tests.ckpt.trainer_stub", json.dumps(settings)]
        if shell:
            command = ["bash", "-c", f'{shell}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "CKPT_FAULTS": json.dumps(list(faults))},
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.writer = self._answer()["writer"]

    def do(self, command: str, *arguments) -> dict:
        """Have it do one thing, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        stdout = self.process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], PATIENCE_S)
        assert ready, "the trainer does not answer"
        line = stdout.readline()
        assert line, f"the trainer is gone: {self.process.wait(PATIENCE_S)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if not gone(self.writer):
            os.kill(self.writer, signal.SIGKILL)
