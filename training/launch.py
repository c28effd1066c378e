"""Start training under torchrun, follow it, stop it, and leave no process behind.

Nothing here imports torch: a flow process uses this module. The ranks run in sessions of their own, so no
terminal signal reaches them; they connect to a control socket, send their events there and receive stop
requests. When this process dies the socket closes, and that alone makes the ranks save and stop.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from training import output, procs, verdict
from training.spec import CONFIG, CONTROL, OWNER, EvaluateSpec, LaunchSpec, Outcome

__all__ = ["EvaluateSpec", "LaunchSpec", "Outcome", "TrainerProcess", "evaluate"]

LINGER_S = 5.0  # for helpers of a rank that ended by itself, such as its loader workers
SETTLE_S = 0.3  # for torchrun to end by itself after its ranks have ended well: all is recorded by then
KILLED_S = 5.0  # from SIGKILL until the process table shows it


def command(spec: LaunchSpec, private: Path) -> list[str]:
    """The torchrun command line of a launch."""
    launcher = spec.config.get("launcher") or {}
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={spec.nproc}",
        f"--max-restarts={int(launcher.get('max_restarts') or 0)}",
        f"--shutdown-timeout={max(1, int(spec.grace_s))}",
        f"--log-dir={private / 'elastic'}",
        # Ranks are forked from torchrun, which has imported torch by then: half the time to the first step.
        "--run-path", "--start-method=fork",
        str(Path(__file__).with_name("main.py")),
    ]  # fmt: skip


def environment(extra: dict[str, str]) -> dict[str, str]:
    """The environment of a child: this process's, with this project's packages importable, and ``extra``.

    Threads that wait for each other sleep unless told otherwise: where cores are shared, with a checkpoint's
    writer at the least, spinning was measured to make a training step three times as long.
    """
    here = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, path] if path else [here]),
        **extra,
    }


class _Rank:
    """A connected rank: its socket, and what it said about itself in its first line."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pending = b""
        self.told = False

    def lines(self) -> list[dict[str, Any]] | None:
        """The complete messages that have arrived; None at end of file."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *whole, self.pending = (self.pending + data).split(b"\n")
        return [json.loads(line) for line in whole if line.strip()]


class TrainerProcess:
    """A running launch.

    ``request_stop``, ``kill`` and ``pids`` may be called from any thread or signal handler.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._owner = spec.env.get(OWNER) or uuid.uuid4().hex
        self._private = Path(tempfile.mkdtemp(prefix="trainer-"))
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._story = verdict.Story()
        self._stop: tuple[str, str] | None = None
        self._deadline: float | None = None
        self._settled: float | None = None
        self._killed = False
        self._sessions: set[int] = set()
        self._ranks: set[_Rank] = set()
        self._outcome: Outcome | None = None
        self._ended = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        try:
            self._listener = self._listen()
            self._agent = self._spawn()
        except BaseException:
            shutil.rmtree(self._private, ignore_errors=True)
            raise
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="trainer-control", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, spec: LaunchSpec) -> TrainerProcess:
        """Start torchrun in a session of its own and return at once."""
        return cls(spec)

    def events(self, timeout: float | None = None) -> Iterator[dict[str, Any]]:
        """Events of rank 0 in order; ends when the trainer has ended, or ``timeout`` seconds from now."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._events.get(timeout=left)
            except queue.Empty:
                return
            if event is None:
                self._events.put(None)
                return
            yield event

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save and stop; whatever still runs ``grace_s`` later is killed."""
        if self._stop is None:
            self._stop = (reason, "preempted")
        self._poke()

    def kill(self) -> None:
        """SIGKILL the whole tree now; checkpoint writers are left to finish what was sealed."""
        self._killed = True
        self._poke()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until everything has ended. Raises TimeoutError after ``timeout`` seconds."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the trainer (pid {self._agent.pid}) still runs after {timeout} s")
        assert self._outcome is not None
        return self._outcome

    def pids(self) -> list[int]:
        """The live processes of this launch: the agent, its ranks, their loader workers."""
        return [row.pid for row in procs.members(self._agent.pid, self._sessions, self._mark)]

    @property
    def _mark(self) -> str:
        return f"{OWNER}={self._owner}"

    def _poke(self) -> None:
        with suppress(BlockingIOError):  # full: it will wake up anyway
            self._waker.send(b"!")

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._private / "control"))
        listener.listen(64)
        listener.setblocking(False)
        return listener

    def _spawn(self) -> subprocess.Popen[bytes]:
        config = self._private / "job.json"
        with open(config, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            json.dump(self.spec.job(), out)
        env = {
            CONTROL: str(self._private / "control"),
            CONFIG: str(config),
            **self.spec.env,
            OWNER: self._owner,
        }
        with (self._private / "agent.log").open("wb") as log:
            return subprocess.Popen(
                command(self.spec, self._private),
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _serve(self) -> None:
        try:
            self._follow()
            self._sweep()
        finally:
            self._outcome = self._story.outcome(self._private, self._agent.wait(), self._stop, self._killed)
            for rank in self._ranks:
                rank.sock.close()
            self._selector.close()
            self._listener.close()
            shutil.rmtree(self._private, ignore_errors=True)
            self._drop_unused_logs()
            self._events.put(None)
            self._ended.set()

    def _drop_unused_logs(self) -> None:
        """Logs of ranks that never opened the run are of use only if that was a failure."""
        assert self._outcome is not None
        if self.spec.log_dir is not None and self._outcome.state != verdict.FAILED:
            for folder in self.spec.log_dir.glob(f"{output.unsettled(self._owner)}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _follow(self) -> None:
        """Serve the ranks until the agent and every rank are gone, or the time for stopping is over."""
        agent = os.pidfd_open(self._agent.pid)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
            self._selector.register(agent, selectors.EVENT_READ, lambda: self._agent_gone(agent))
            while self._agent.poll() is None or self._ranks:
                if self._killed:
                    return
                now = time.monotonic()
                if self._settled is not None and now >= self._settled:
                    return  # torchrun may hang or wait for long, and nothing is left for it to do
                if self._deadline is not None and now >= self._deadline:
                    self._story.overdue(self.spec.grace_s)
                    return
                until = min((t for t in (self._settled, self._deadline) if t is not None), default=None)
                for key, _ in self._selector.select(None if until is None else until - now):
                    key.data()
        finally:
            os.close(agent)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            rank = _Rank(sock)
            self._ranks.add(rank)
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(rank))
            if self._stop:
                self._tell(rank)

    def _read(self, rank: _Rank) -> None:
        lines = rank.lines()
        if lines is None:
            self._selector.unregister(rank.sock)
            self._ranks.discard(rank)
            rank.sock.close()
            if not self._ranks and self._story.end is not None:
                self._settled = time.monotonic() + SETTLE_S
            return
        for line in lines:
            if "hello" in line:
                self._settled = None
                self._sessions.add(int(line["pid"]))
            self._story.hear(line)
            if "event" in line:
                self._events.put(line)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        if self._stop and self._deadline is None:
            self._begin_stop()

    def _begin_stop(self) -> None:
        self._deadline = time.monotonic() + self.spec.grace_s
        if not self._ranks:
            # No rank has begun, or all are gone: there is nothing to save, and nothing that could hear us.
            procs.end(self._agent.pid, self._sessions, self._mark)
        for rank in self._ranks:
            self._tell(rank)

    def _tell(self, rank: _Rank) -> None:
        assert self._stop is not None
        if not rank.told:
            rank.told = True
            with suppress(OSError):
                rank.sock.send(json.dumps({"stop": self._stop[0], "as": self._stop[1]}).encode() + b"\n")

    def _agent_gone(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        self._agent.wait()
        if self._ranks and self._stop is None:
            # Ranks outlive a killed agent and would train on, unwatched by anyone who could restart them.
            self._stop = (f"torchrun ended ({verdict.exit_text(self._agent.returncode)})", "failed")
        if self._ranks and self._deadline is None:
            self._begin_stop()

    def _sweep(self) -> None:
        """Nothing of the launch may be left: wait for what is ending by itself, then kill the rest."""
        patient = self._agent.poll() is not None and not self._story.late
        deadline = time.monotonic() + (LINGER_S if patient else 0.0)
        while time.monotonic() < deadline and self.pids():
            time.sleep(0.02)
        deadline = time.monotonic() + KILLED_S
        while self.pids() and time.monotonic() < deadline:
            procs.end(self._agent.pid, self._sessions, self._mark)
            self._agent.poll()
            time.sleep(0.01)


def evaluate(spec: EvaluateSpec) -> dict[str, Any]:
    """Evaluate a checkpoint in a process of its own: ``{"val_loss", "samples", "step"}``.

    Only the model's bytes are read and nothing is written to the run. Raises RuntimeError with the last
    lines of its output if it fails, TimeoutError after ``timeout_s``. It ends when this process ends.
    """
    job = {"config": dict(spec.config), "checkpoint": spec.checkpoint, "samples": spec.samples}
    child = subprocess.Popen(
        [sys.executable, "-m", "training.evaluate"],
        env=environment(dict(spec.env)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin and child.stdout and child.stderr
    errors: list[bytes] = []
    drain = threading.Thread(target=lambda pipe: errors.extend(pipe), args=(child.stderr,), daemon=True)
    drain.start()
    timer = threading.Timer(spec.timeout_s or 1e9, child.kill) if spec.timeout_s else None
    try:
        if timer:
            timer.start()
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(job).encode() + b"\n")
            child.stdin.flush()
        answer = child.stdout.read()  # its stdin stays open meanwhile: the child ends when we do
        code = child.wait()
    finally:
        if timer:
            timer.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()
        drain.join(1.0)
        child.stdin.close()
        child.stdout.close()
        child.stderr.close()
    if code == 0:
        result: dict[str, Any] = json.loads(answer)
        return result
    if timer and code == -signal.SIGKILL:
        raise TimeoutError(f"evaluating {spec.checkpoint} took longer than {spec.timeout_s} s")
    tail = b"".join(errors[-15:]).decode(errors="replace").strip()
    raise RuntimeError(f"evaluating {spec.checkpoint} failed ({verdict.exit_text(code)}):\n{tail}")
