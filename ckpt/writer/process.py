"""The writer process: hears the trainer, keeps the attempts, and decides when it may go.

Its main thread only listens; storage is touched by lanes. When the trainer closes, or dies, what is sealed is
finished, what is not is removed, and the process ends: after a death within `posthumous_s`, whatever happens.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt import names
from ckpt.arena import Arena
from ckpt.store import open_store
from ckpt.writer.lane import Lane
from ckpt.writer.messages import PROTOCOL, Inbox, ProtocolError, pack
from ckpt.writer.options import WriterOptions
from ckpt.writer.persist import Persister
from ckpt.writer.priority import Session
from ckpt.writer.retry import errno_of
from ckpt.writer.save import Save, VoidError
from ckpt.writer.words import LastWords

if TYPE_CHECKING:
    from ckpt.writer.lead import Lead

_LAST_GRACE_S = 5.0


class Writer:
    """One writer process, made from the trainer's first message."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any], session: Session) -> None:
        if hello["kind"] != "hello" or hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"expected a hello of protocol {PROTOCOL}, got {hello!r:.200}")
        self._sock = sock
        self._session = session
        self._sending = threading.Lock()
        self._options = WriterOptions(**hello["options"])
        rank, launch = int(hello["rank"]), int(hello["launch"])
        store = open_store(str(hello["run_uri"]))
        self._words = LastWords(store, launch, rank)
        self._persister = Persister(store, rank, self._options, self._say)
        self._persisting = Lane("persist")
        self._lead: Lead | None = None
        self._arenas: dict[int, Arena] = {}
        self._layouts: dict[int, dict[str, Any]] = {}
        self._saves: dict[int, Save] = {}
        self._ending: threading.Thread | None = None
        self._deadline: float | None = None
        self.finished = os.eventfd(0, os.EFD_CLOEXEC)
        self.tell("ready", pid=os.getpid())
        if rank == 0:
            # Imported here, behind the answer: the trainer need not wait for what is only needed later.
            from ckpt.writer import lead

            self._lead = lead.Lead(store, launch, self._options, self.tell, self._say)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send one event to the trainer; after its death, write it down beside the logs."""
        if self._deadline is None:
            with suppress(OSError), self._sending:
                self._sock.sendall(pack(kind, **fields))
                return
        self._words.add(kind, fields)

    def hear(self, message: dict[str, Any], inbox: Inbox) -> None:
        """Act on one message; ProtocolError if it is none that a trainer sends, or not whole."""
        handlers: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "seal": self._seal,
            "abort": self._abort,
            "commit": self._commit,
            "prune": self._prune,
            "step": self._step,
            "hurry": self._hurry,
            "close": self._end,
        }
        fields = {name: value for name, value in message.items() if name != "kind"}
        try:
            if message["kind"] == "attach":
                self._attach(inbox.take_fd(), **fields)
            elif message["kind"] in handlers:
                handlers[message["kind"]](**fields)
            else:
                raise ProtocolError("no such message")
        except (TypeError, ValueError, KeyError, ProtocolError) as error:
            raise ProtocolError(f"bad {message['kind']!r} message from the trainer: {error}") from error

    def orphaned(self) -> None:
        """The trainer is gone: finish what is sealed, remove the rest, within `posthumous_s`."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._options.posthumous_s
            if self._lead is not None:
                self._lead.heart.drain()
            self._end()

    def overdue(self) -> bool:
        """Void what is not durable once the time after the trainer's death is up; True when even that hangs.

        To be asked every second or so after `orphaned`.
        """
        late = 0.0 if self._deadline is None else time.monotonic() - self._deadline
        if late > 0:
            for save in self._saves.values():
                if not save.durable:
                    save.stop(f"not durable {self._options.posthumous_s:g} s after its trainer's death")
        return late > _LAST_GRACE_S

    def _say(self, text: str) -> None:
        self.tell("notice", text=text)

    def _attach(self, fd: int, slot: int, size: int) -> None:
        arena = Arena.map_for_reading(fd, size)
        old = self._arenas.pop(slot, None)
        if old is not None:
            self._persisting.add(old.close)  # behind the saves that may still read it
        self._arenas[slot] = arena
        self._layouts.pop(slot, None)

    def _begin(self, attempt: str, slot: int, layout: dict[str, Any] | None) -> None:
        _check_name(attempt)
        if self._ending is not None:
            return
        if layout is not None:
            self._layouts[slot] = layout
        known, arena = self._layouts[slot], self._arenas[slot]
        if not 0 < known["size"] <= arena.size:
            raise ProtocolError(f"a shard of {known['size']} bytes in an arena of {arena.size}")
        old = self._saves.get(slot)
        if old is not None and not old.durable:
            old.stop(f"its arena was taken over by {attempt}")
        save = Save(attempt, arena, known["size"], known["tensors"])
        self._saves[slot] = save
        self._session.lower()
        self._persisting.add(lambda: self._persist(save))

    def _persist(self, save: Save) -> None:
        try:
            self._persister.check_run(save)
            self._persister.persist(save)
            save.check()
        except VoidError:
            self._discard(save.attempt)
        except BaseException as error:
            self._discard(save.attempt)
            if save.stopped is not None:
                return  # void already: what failed afterwards is of no interest to anybody
            self.tell(
                "failed",
                attempt=save.attempt,
                phase="persist",
                error=self._persister.explain(save, error),
                errno=errno_of(error),
            )
        else:
            now = time.monotonic()
            self.tell("durable", attempt=save.attempt, bytes=save.size, persist_s=now - save.begun, t=now)

    def _discard(self, attempt: str) -> None:
        try:
            self._persister.discard(attempt)
        except Exception as error:
            self._say(f"{attempt} is void, but its files could not be removed: {error}")

    def _save(self, attempt: str) -> Save | None:
        return next((save for save in self._saves.values() if save.attempt == attempt), None)

    def _seal(self, part: dict[str, Any]) -> None:
        save = self._save(part["attempt"])
        if save is not None:
            save.seal(part)

    def _abort(self, attempt: str, reason: str) -> None:
        _check_name(attempt)
        save = self._save(attempt)
        if save is not None:
            save.stop(reason)
        if self._ending is None:
            self._persisting.add(lambda: self._clear(attempt))

    def _clear(self, attempt: str) -> None:
        self._discard(attempt)
        if self._lead is not None:
            self._lead.clear(attempt)

    def _commit(self, attempt: str, world_size: int) -> None:
        if self._ending is None:
            self._leader().commit(attempt, world_size, self._save(attempt))

    def _prune(self, attempts: list[str]) -> None:
        if self._ending is None:
            self._leader().prune(attempts)

    def _step(self, step: int) -> None:
        self._leader().heart.at_step(step)

    def _leader(self) -> "Lead":
        if self._lead is None:
            raise ProtocolError("only rank 0's writer does this")
        return self._lead

    def _hurry(self) -> None:
        self._session.restore()
        for save in self._saves.values():
            save.hurry()

    def _end(self) -> None:
        self._hurry()
        for save in self._saves.values():
            save.stop_unless_sealed("its trainer went before the state was whole")
        if self._ending is None:
            self._ending = threading.Thread(target=self._finish, name="ending", daemon=True)
            self._ending.start()

    def _finish(self) -> None:
        try:
            self._persisting.finish()
            for save in self._saves.values():
                if save.stopped is not None:
                    self._discard(save.attempt)
            if self._lead is not None:
                for save in self._saves.values():
                    if self._deadline is not None and save.durable and save.stopped is None:
                        self._lead.commit_when_whole(save, self._deadline)
                self._lead.finish()
            if self._deadline is None:
                self.tell("bye")
        finally:
            os.eventfd_write(self.finished, 1)


def _check_name(attempt: str) -> None:
    if names.parse_attempt(attempt) is None:
        raise ProtocolError(f"{attempt!r} is not an attempt")
