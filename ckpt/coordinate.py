"""The ranks of a process group as a team: agreement through a key-value store that rank 0 serves.

One client per thread, and a deadline for every wait: a rank that is slow or fails makes one save
void, where a collective that times out would break its group for good.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ckpt.errors import StorageError
from ckpt.team import Decision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEPT = 256
_GOODBYE_S = 10.0
_END = "end"


class Group:
    """A team of the ranks of a process group. Made by all of them at the same time."""

    def __init__(self, process_group: ProcessGroup, timeout_s: float) -> None:
        """Collective. `timeout_s` bounds every wait for another rank."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank(process_group)
        self.world_size = len(ranks)
        self._timeout_s = timeout_s
        # Planning's collectives never share a group with training's, which run on another thread.
        self.group: ProcessGroup | None = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
        )
        self._server: Any = None
        if self.rank == 0:
            self._server = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=timeout_s), False)
        address = [(_own_address(), self._server.port if self._server else 0)]
        dist.broadcast_object_list(address, src=ranks[0], group=self.group)
        host, self._port = address[0]
        self._host = "localhost" if self.rank == 0 else host
        self._local = threading.local()
        self._outbox: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._decided: dict[int, Decision] = {}
        self._arrived = threading.Condition()
        self._ahead = Decision()
        self._stop = False
        self._stop_told = False
        self._lost: str | None = None
        self._published = 0
        work = self._publish if self.rank == 0 else self._listen
        self._thread = threading.Thread(target=work, name="ckpt-decisions", daemon=True)
        self._thread.start()

    @property
    def _client(self) -> Any:
        import torch.distributed as dist

        if not hasattr(self._local, "client"):
            timeout = timedelta(seconds=self._timeout_s)
            self._local.client = dist.TCPStore(self._host, self._port, None, False, timeout, False)
        return self._local.client

    def decide(self, call: int, now: Callable[[], Decision], ahead: Callable[[], Decision]) -> Decision:
        """Rank 0 publishes the next call's decision; the others usually have this call's already."""
        if self.rank == 0:
            decision = self._ahead
            if call == 0:
                decision = now()
                self._outbox.put(("d/0", json.dumps(decision)))
            self._ahead = ahead()
            self._outbox.put((f"d/{call + 1}", json.dumps(self._ahead)))
            self._published = call + 2
            return decision
        if self._stop and not self._stop_told:
            self._stop_told = True
            self._ask(lambda: self._client.set("stop", str(self.rank)), "rank 0 is gone")
        deadline = time.monotonic() + self._timeout_s
        with self._arrived:
            while call not in self._decided:
                left = deadline - time.monotonic()
                if self._lost or left <= 0:
                    cause = self._lost or f"no answer in {self._timeout_s:g} s"
                    raise StorageError(
                        f"rank {self.rank} heard nothing of rank 0 at call {call} of step(): {cause}. "
                        "All ranks have to call step()"
                    )
                self._arrived.wait(left)
            return self._decided.pop(call)

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """Through the store; waits for rank 0."""
        if self.rank == 0:
            made = make()
            self._client.set(f"s/{name}", json.dumps(made))
            return made
        return json.loads(self._ask(lambda: self._client.get(f"s/{name}"), f"rank 0 did not share {name}"))

    def ask_stop(self) -> None:
        """Told to rank 0 at the next call of `decide`."""
        self._stop = True

    def stop_asked(self) -> bool:
        """Whether this or any other rank was asked."""
        return self._stop

    def report(self, attempt: str, text: str) -> None:
        """As one key per rank."""
        self._ask(lambda: self._client.set(f"r/{attempt}/{self.rank}", text), "could not report to rank 0")

    def reports(self, attempt: str) -> dict[int, str]:
        """Those that are there."""
        keys = {rank: f"r/{attempt}/{rank}" for rank in range(self.world_size)}
        return {
            rank: self._client.get(key).decode() for rank, key in keys.items() if self._client.check([key])
        }

    def publish_verdict(self, attempt: str, text: str) -> None:
        """As one key."""
        self._client.set(f"v/{attempt}", text)

    def verdict(self, attempt: str) -> str | None:
        """Asks the store once."""
        key = f"v/{attempt}"
        if not self._ask(lambda: self._client.check([key]), "rank 0 is gone"):
            return None
        return bytes(self._client.get(key)).decode()

    def release(self, attempt: str) -> None:
        """As one key per rank."""
        self._ask(lambda: self._client.set(f"f/{attempt}/{self.rank}", ""), "rank 0 is gone")

    def released(self, attempt: str) -> bool:
        """Asks the store once; forgets the attempt when all have."""
        ranks: Sequence[int] = range(self.world_size)
        if not self._client.check([f"f/{attempt}/{rank}" for rank in ranks]):
            return False
        for key in (f"v/{attempt}", *(f"{kind}/{attempt}/{rank}" for kind in "rf" for rank in ranks)):
            self._client.delete_key(key)
        return True

    def close(self) -> None:
        """The store's server goes last, but waits for nobody longer than a few seconds."""
        if self.rank == 0:
            self._outbox.put((f"d/{self._published}", _END))
            self._outbox.put(None)
            self._thread.join(_GOODBYE_S)
        try:
            self._client.set(f"bye/{self.rank}", "")
            if self.rank == 0:
                keys = [f"bye/{rank}" for rank in range(self.world_size)]
                self._client.wait(keys, timedelta(seconds=_GOODBYE_S))
        except Exception:
            pass  # whoever did not say goodbye is gone or late; neither is a reason to fail here
        if self.rank != 0:
            self._thread.join(_GOODBYE_S)

    def _ask(self, question: Callable[[], Any], advice: str) -> Any:
        try:
            return question()
        except Exception as error:
            raise StorageError(f"{advice}: {str(error).splitlines()[0]}") from error

    def _publish(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._client.set(*item)
                old = int(item[0].removeprefix("d/")) - _KEPT
                if old >= 0:
                    self._client.delete_key(f"d/{old}")
                if not self._stop and self._client.check(["stop"]):
                    self._stop = True
        except Exception as error:
            self._lost = str(error).splitlines()[0]

    def _listen(self) -> None:
        call = 0
        try:
            while (text := bytes(self._client.get(f"d/{call}")).decode()) != _END:
                token, replan, stop, error = json.loads(text)
                with self._arrived:
                    self._decided[call] = Decision(token, replan, stop, error and (error[0], error[1]))
                    self._arrived.notify_all()
                call += 1
            self._lost = "rank 0 has closed its manager"
        except Exception as error:
            self._lost = str(error).splitlines()[0]
        with self._arrived:
            self._arrived.notify_all()


def _own_address() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
