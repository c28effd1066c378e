"""The trainer's side of its writer process."""

import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt import values
from ckpt.arena import Arena
from ckpt.errors import StorageError
from ckpt.layout import ShardLayout, part_tensors
from ckpt.writer.events import Event, Exited, from_message
from ckpt.writer.messages import PROTOCOL, Inbox, ProtocolError, pack
from ckpt.writer.options import WriterOptions

_START_S = 60.0
_SEND_S = 60.0
_STDERR_TAIL = 4000


class WriterClient:
    """A running writer process. All methods may be called from any thread.

    Whatever is sent to a writer that is gone raises StorageError, except `abort`, `hurry` and `close`.
    """

    def __init__(self, sock: socket.socket, stderr: int) -> None:
        self.pid = 0
        self._sock = sock
        # A writer that no longer reads (stopped, frozen) must not hang the trainer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_S), 0))
        self._stderr = stderr
        self._sending = threading.Lock()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._gone = threading.Event()
        self._reason = ""
        self._arenas: dict[int, Arena] = {}
        self._layout_sent: set[int] = set()
        self._slots: dict[str, int] = {}
        self._reader = threading.Thread(target=self._read, name="ckpt-writer-events", daemon=True)

    @classmethod
    def start(
        cls, run_uri: str, rank: int, launch_number: int, *, options: WriterOptions | None = None
    ) -> "WriterClient":
        """Start a writer process and return when it is ready (about 0.1 s).

        Raises StorageError, with the process's own last words, if it does not come up.
        """
        options = options or WriterOptions()
        ours, theirs = socket.socketpair()
        stderr = os.memfd_create("ckpt-writer-stderr", os.MFD_CLOEXEC)
        client = cls(ours, stderr)
        hello = pack(
            "hello",
            protocol=PROTOCOL,
            run_uri=str(run_uri),
            rank=rank,
            launch=launch_number,
            options=options.plain(),
        )
        client._reader.start()
        cause = ""
        try:
            with theirs:
                # -P: nothing that lies in the working directory may take a module's place.
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ckpt.writer", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    env=_environment(),
                )
            client._send(hello)
            # The process that was started forks the writer and ends; it is reaped here.
            process.wait(_START_S)
            client._ready.wait(_START_S)
            if client.pid and not client._gone.is_set():
                return client
            cause = client._reason or f"it said nothing for {_START_S:g} s"
        except (OSError, subprocess.TimeoutExpired) as error:
            cause = str(error)
        except StorageError:
            cause = client._reason
        client._hang_up()
        raise StorageError(f"the checkpoint writer process did not start: {cause}")

    @property
    def alive(self) -> bool:
        """Whether the writer process is still there, as far as is known."""
        return not self._gone.is_set()

    def attach(self, arena: Arena, slot: int = 0) -> None:
        """Give the writer the arena of a slot, in place of the one it had; no save may be in flight there."""
        self._arenas[slot] = arena
        self._layout_sent.discard(slot)
        self._send(pack("attach", slot=slot, size=arena.size), fd=arena.fd)

    def begin(
        self,
        attempt: str,
        layout: ShardLayout,
        layout_changed: bool = True,
        slot: int = 0,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an attempt: the writer writes the staged prefix of the slot's arena as the watermark grows.

        Puts the layout's header at the arena's start and the watermark behind it. `tensors` is the part's
        entry of that name, if it holds more than the layout does (empty slices). Both are sent only where the
        layout has changed or the writer has not seen it.
        """
        arena = self._arenas[slot]
        header = len(layout.header)
        arena.watermark = 0
        arena.buffer[:header] = layout.header
        arena.watermark = header
        changed = layout_changed or slot not in self._layout_sent
        sent = None
        if changed:
            if tensors is None:
                tensors = part_tensors([placed.slice for placed in layout.placed], layout)
            sent = {"size": layout.size, "tensors": dict(tensors)}
        self._slots = {known: number for known, number in self._slots.items() if number != slot}
        self._slots[attempt] = slot
        self._send(pack("begin", attempt=attempt, slot=slot, layout=sent))
        self._layout_sent.add(slot)

    def progress(self, nbytes: int, slot: int = 0) -> None:
        """The first `nbytes` of the shard (header included) are staged; costs no system call."""
        self._arenas[slot].watermark = nbytes

    def seal(self, part: Mapping[str, Any]) -> None:
        """The state in the arena is whole and of one moment: finish the shard, then write this part.

        The writer adds the part's `file`, its `tensors` (from the layout) if absent, and `persist_s` to the
        costs of a lead.
        """
        lead = part.get("lead")
        # Encoded for the way only: JSON alone would turn tuples into lists and refuse dates.
        sent = {**part, "lead": None if lead is None else values.encode(dict(lead), "lead", ordered=False)}
        self._send(pack("seal", part=sent))

    def abort(self, reason: str, attempt: str | None = None) -> None:
        """Make an attempt (default: the one begun last) void; the writer removes what it made of it."""
        if attempt is None:
            attempt = next(reversed(self._slots), None)
        if attempt is not None:
            with contextlib.suppress(StorageError):
                self._send(pack("abort", attempt=attempt, reason=reason))

    def commit(self, attempt: str, world_size: int) -> None:
        """Rank 0 only: all ranks are durable, write the manifest."""
        self._send(pack("commit", attempt=attempt, world_size=world_size))

    def prune(self, attempts: Sequence[str]) -> None:
        """Rank 0 only: delete these attempts in the background."""
        self._send(pack("prune", attempts=list(attempts)))

    def beat_phase(self, step: int) -> None:
        """Rank 0 only: what the heartbeat says the training's step is."""
        self._send(pack("step", step=step))

    def hurry(self) -> None:
        """Somebody waits for what is in flight: go on at normal priority."""
        with contextlib.suppress(StorageError):
            self._send(pack("hurry"))

    def next_event(self, timeout: float | None) -> Event | None:
        """The writer's next event, or None if there is none within `timeout` seconds (None: wait for one), or
        after a `nudge`.
        """
        try:
            return self._events.get(timeout=timeout) if timeout != 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def nudge(self) -> None:
        """Wake who waits for the next event."""
        self._events.put(None)

    def close(self, timeout: float) -> bool:
        """Let the writer finish what is sealed and asked for, and end; False if that takes over `timeout` s.

        A writer that is still busy goes on by itself, as after its trainer's death. Events stay readable.
        """
        with contextlib.suppress(StorageError):
            self._send(pack("close"))
        drained = self._gone.wait(timeout)
        self._hang_up()
        return drained

    def _send(self, data: bytes, fd: int | None = None) -> None:
        try:
            with self._sending:
                if self._gone.is_set():
                    raise OSError("its socket is closed")
                if fd is not None:
                    sent = socket.send_fds(self._sock, [data], [fd])
                    data = data[sent:]
                self._sock.sendall(data)
        except OSError as error:
            self._hang_up()  # part of a message may be sent: nothing that follows could be understood
            self._gone.wait(1.0)  # for the reader to have found out why
            raise StorageError(
                f"the checkpoint writer process (pid {self.pid}) is gone: {self._reason or error}; "
                "start another one to go on saving"
            ) from error

    def _read(self) -> None:
        inbox = Inbox(self._sock)
        closed = False
        try:
            while inbox.receive():
                for message in inbox.messages():
                    if message["kind"] == "ready":
                        self.pid = int(message["pid"])
                        self._ready.set()
                    elif message["kind"] == "bye":
                        closed = True
                    else:
                        self._events.put(from_message(message))
            reason = "closed" if closed else self._last_words()
        except (OSError, ProtocolError) as error:
            reason = str(error)
        self._reason = reason
        self._gone.set()
        with self._sending:
            self._sock.close()
            os.close(self._stderr)
        self._ready.set()
        self._events.put(Exited(self._reason))

    def _last_words(self) -> str:
        size = os.fstat(self._stderr).st_size
        tail = (
            os.pread(self._stderr, _STDERR_TAIL, max(0, size - _STDERR_TAIL)).decode(errors="replace").strip()
        )
        return f"it ended unexpectedly: {tail or 'killed, or out of memory; it left no message'}"

    def _hang_up(self) -> None:
        # shutdown, not only close: children that the trainer forked may hold copies of the descriptor.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _environment() -> dict[str, str]:
    # The writer must find this very package, however the trainer came to it.
    home = str(Path(__file__).resolve().parents[2])
    old = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{old}" if old else home}
