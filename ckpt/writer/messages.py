"""What the trainer and its writer process say to each other: JSON messages with a length in front.

File descriptors travel beside the message that speaks of them. Sizes are bounded on both sides, and anything
that is not a message of this protocol is a `ProtocolError` that says what was wrong.
"""

import array
import json
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

from ckpt.errors import CheckpointError

PROTOCOL = 1
MAX_MESSAGE = 256 << 20
_LENGTH = struct.Struct("!I")
_READ = 1 << 20
_MAX_FDS = 4
_EXTRA = socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize)


class ProtocolError(CheckpointError):
    """The other side of the writer's socket sent something that is not a message of this protocol."""


def pack(kind: str, **fields: Any) -> bytes:
    """One message as bytes; ProtocolError if it is larger than the protocol allows."""
    body = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(
            f"a {kind!r} message of {len(body)} bytes is over the limit of {MAX_MESSAGE}: "
            "keep large values of the state in tensors, which are not sent"
        )
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts the byte stream of one socket into messages; keeps the file descriptors that came with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, wait: bool = True) -> bool:
        """Read once; False at the socket's end. Without `wait`, BlockingIOError if nothing is there."""
        try:
            # Not socket.recv_fds: it takes flags, but drops them.
            data, extra, flags, _ = self._sock.recvmsg(_READ, _EXTRA, 0 if wait else socket.MSG_DONTWAIT)
        except ConnectionError:
            return False
        for level, kind, raw in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                f"more than {_MAX_FDS} file descriptors came with one message, or this process is out of them"
            )
        self._data += data
        return bool(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """The whole messages received so far, each once."""
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message claims {length} bytes, the limit is {MAX_MESSAGE}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield _parse(body)

    def take_fd(self) -> int:
        """The oldest file descriptor received and not yet taken; ProtocolError if there is none."""
        if not self._fds:
            raise ProtocolError("a message speaks of a file descriptor, but none came with it")
        return self._fds.popleft()


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a message of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("a message is not an object with a 'kind'")
    return message
