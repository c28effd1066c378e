"""The loop of a writer process: listens to its trainer until that closes or dies, then sees the work out."""

import os
import select
import socket
import traceback

from ckpt.writer.messages import Inbox, ProtocolError
from ckpt.writer.priority import Session
from ckpt.writer.process import Writer

_WATCH_MS = 1000


def serve(sock: socket.socket, trainer: int | None, session: Session) -> int:
    """Run a writer on its socket until its work is done; `trainer` is a pidfd of the trainer,
    `session` the session that this process runs in.

    Returns the exit status: 0 when the work was seen through, 1 when the trainer broke the protocol, never
    said hello, or the storage hung beyond all deadlines.
    """
    inbox = Inbox(sock)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if trainer is not None:
        # The socket alone does not tell: a child that the trainer forked may hold its other end open.
        poller.register(trainer, select.POLLIN)
    writer: Writer | None = None
    status = 0
    orphaned = False
    while True:
        ready = {fd for fd, _ in poller.poll(_WATCH_MS if orphaned else None)}
        if writer is not None and writer.finished in ready:
            return status
        if not orphaned:
            try:
                alive = _hear(inbox) and trainer not in ready
                for message in inbox.messages():
                    if writer is None:
                        writer = Writer(sock, message, session)
                        poller.register(writer.finished, select.POLLIN)
                    else:
                        writer.hear(message, inbox)
            except ProtocolError:
                traceback.print_exc()
                alive, status = False, 1
            if not alive:
                orphaned = True
                poller.unregister(sock)
                if trainer is not None:
                    poller.unregister(trainer)
                    os.close(trainer)
                if writer is None:
                    return 1
                writer.orphaned()
        if writer is not None and writer.overdue():
            return 1


def _hear(inbox: Inbox) -> bool:
    """Read all that has arrived; False at the end of the stream."""
    try:
        while inbox.receive(wait=False):
            pass
    except BlockingIOError:
        return True
    return False
