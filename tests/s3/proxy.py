"""An HTTP proxy in front of an object store that counts requests and breaks chosen ones on purpose.

It passes every header on as it came, Host included, so that signatures stay valid.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

_BLOCK = 1 << 18
_MAX_HEAD = 1 << 16

# What a rule can do. The first four answer without asking the store.
SLOW_DOWN = "slow_down"  # 503 SlowDown
EXPIRED = "expired"  # 400 ExpiredToken
DENIED = "denied"  # 403 AccessDenied
FAIL = "fail"  # 500 InternalError
RESET = "reset"  # the connection is reset before the request is carried out
RESET_MIDWAY = "reset_midway"  # ... after half of the request's body has been read
LOST_REPLY = "lost_reply"  # the request is carried out, and the connection reset instead of an answer
SLOW = "slow"  # carried out after `seconds`
HANG = "hang"  # no answer until the proxy stops
TRUNCATE = "truncate"  # half of the answer's body, then the connection is closed
FLIP_REPLY = "flip_reply"  # a bit of the answer's body is turned
FLIP_REQUEST = "flip_request"  # a bit of the request's body is turned

_ERRORS = {
    SLOW_DOWN: (503, "Slow Down", "SlowDown", "Please reduce your request rate."),
    EXPIRED: (400, "Bad Request", "ExpiredToken", "The provided token has expired."),
    DENIED: (403, "Forbidden", "AccessDenied", "Access Denied"),
    FAIL: (500, "Internal Server Error", "InternalError", "We encountered an internal error."),
}


@dataclass(frozen=True)
class Request:
    """One request as it came: `kind` is list, get, head, put, part, begin, complete, abort, delete, copy or
    other; `key` the object's key within its bucket, the prefix for a list; `rule` what was done to it."""

    method: str
    kind: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    rule: str | None = None


@dataclass
class Rule:
    """Does `action` to requests of `kind` (None: any) whose key matches `key`, a regular expression: the
    first `times` after letting `skip` pass, or all. `hits` counts those it was done to."""

    action: str
    kind: str | None = None
    key: str = ""
    times: int | None = None
    skip: int = 0
    seconds: float = 1.0
    hits: int = 0

    def takes(self, request: Request) -> bool:
        kinds = None if self.kind is None else self.kind.split("|")
        if kinds is not None and request.kind not in kinds:
            return False
        if not re.search(self.key, request.key):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


@dataclass
class FaultProxy:
    """Listens on 127.0.0.1 and passes on to `upstream`, `(host, port)`. With `tls` it speaks TLS to
    clients. A context manager."""

    upstream: tuple[str, int]
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        # Closing alone would not wake a thread that is in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for each in left:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def inject(self, action: str, kind: str | None = None, key: str = "", **more: object) -> Rule:
        """Add a rule; the first that takes a request is applied."""
        rule = Rule(action, kind, key, **more)  # type: ignore[arg-type]
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and requests."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()

    def seen(self, kind: str | None = None, key: str = "") -> list[Request]:
        """Requests so far of a kind (`put|part` for several) whose key matches."""
        with self._lock:
            kinds = None if kind is None else kind.split("|")
            return [r for r in self.requests if (kinds is None or r.kind in kinds) and re.search(key, r.key)]

    def counts(self) -> Counter[str]:
        """Requests so far, by kind."""
        with self._lock:
            return Counter(r.kind for r in self.requests)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        """One client's connection, request after request."""
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server: _Peer | None = None
        try:
            client = _Peer(self.tls.wrap_socket(raw, server_side=True) if self.tls else raw)
            self._keep(client.socket)
            while not self._stopping.is_set():
                head = client.head()
                if head is None:
                    return
                if server is None:
                    server = _Peer(socket.create_connection(self.upstream))
                    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._keep(server.socket)
                if not self._exchange(client, server, head):
                    return
        except (OSError, ssl.SSLError, _EndedError):
            return
        finally:
            for each in (raw, client.socket if "client" in locals() else None, server and server.socket):
                if each is not None:
                    with self._lock:
                        self._open.discard(each)
                    with contextlib.suppress(OSError):
                        each.close()

    def _keep(self, made: socket.socket) -> None:
        with self._lock:
            self._open.add(made)

    def _note(self, head: _Head) -> tuple[Request, Rule | None]:
        request = _request(head)
        with self._lock:
            rule = next((r for r in self.rules if r.takes(request)), None)
            noted = Request(**{**vars(request), "rule": rule.action if rule else None})
            self.requests.append(noted)
        return noted, rule

    def _exchange(self, client: _Peer, server: _Peer, head: _Head) -> bool:
        """One request and its answer. False if the connection is of no use any more."""
        request, rule = self._note(head)
        action = rule.action if rule else None
        if head.fields.get("expect", "").lower() == "100-continue" and action != RESET:
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if action in _ERRORS:
            for _ in client.body(head):
                pass
            client.send(_error(action, request))
            return True
        if action == RESET:
            return _reset(client)
        if action == RESET_MIDWAY:
            left = int(head.fields.get("content-length", 0)) // 2
            for block in client.body(head):
                left -= len(block)
                if left <= 0:
                    break
            return _reset(client)
        if rule is not None and action == SLOW:
            self._stopping.wait(rule.seconds)
        if action == HANG:
            self._stopping.wait()
            return False
        server.send(head.raw_without("expect"))
        _pass(client.body(head), server, flip=action == FLIP_REQUEST)
        return self._answer(client, server, head, action)

    def _answer(self, client: _Peer, server: _Peer, head: _Head, action: str | None) -> bool:
        reply = server.head()
        while reply is not None and reply.status == 100:
            reply = server.head()
        if reply is None:
            return False
        body = server.body(reply, no_body=head.method == "HEAD" or reply.status in (204, 304))
        if action == LOST_REPLY:
            for _ in body:
                pass
            return _reset(client)
        client.send(reply.raw)
        if action == TRUNCATE:
            left = int(reply.fields.get("content-length", 0)) // 2
            for block in body:
                client.send(block[:left])
                left -= len(block)
                if left <= 0:
                    return False
        _pass(body, client, flip=action == FLIP_REPLY)
        closing = "close" in (
            reply.fields.get("connection", "").lower(),
            head.fields.get("connection", "").lower(),
        )
        return not closing


class _EndedError(Exception):
    """The other side has closed the connection in the middle of something."""


@dataclass(frozen=True)
class _Head:
    """The first line and the fields of a request or an answer."""

    raw: bytes
    first: list[str]
    fields: dict[str, str]

    @property
    def method(self) -> str:
        return self.first[0]

    @property
    def status(self) -> int:
        return int(self.first[1])

    def raw_without(self, name: str) -> bytes:
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(line for line in lines if line.split(b":")[0].strip().lower() != name.encode())


class _Peer:
    """A connection with what was read of it too far."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._left = b""

    def send(self, data: bytes | memoryview) -> None:
        self.socket.sendall(data)

    def head(self) -> _Head | None:
        """The next head, None at the connection's end."""
        while b"\r\n\r\n" not in self._left:
            more = self.socket.recv(_BLOCK)
            if not more or len(self._left) > _MAX_HEAD:
                return None
            self._left += more
        text, _, self._left = self._left.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        return _Head(text + b"\r\n\r\n", first.split(" ", 2), fields)

    def body(self, head: _Head, no_body: bool = False) -> Iterator[memoryview | bytes]:
        """The body's bytes as they come over the wire, framing of chunks included."""
        if no_body:
            return
        if "chunked" in head.fields.get("transfer-encoding", "").lower():
            yield from self._chunks()
            return
        left = int(head.fields.get("content-length", 0))
        if self._left and left:
            first, self._left = self._left[:left], self._left[left:]
            left -= len(first)
            yield first
        block = memoryview(bytearray(min(_BLOCK, left)))
        while left:
            count = self.socket.recv_into(block[: min(len(block), left)])
            if not count:
                raise _EndedError
            left -= count
            yield block[:count]

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self._line()
            yield line
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while True:
                    trailer = self._line()
                    yield trailer
                    if trailer == b"\r\n":
                        return
            while len(self._left) < size + 2:
                self._more()
            data, self._left = self._left[: size + 2], self._left[size + 2 :]
            yield data

    def _line(self) -> bytes:
        while b"\r\n" not in self._left:
            self._more()
        line, _, self._left = self._left.partition(b"\r\n")
        return line + b"\r\n"

    def _more(self) -> None:
        more = self.socket.recv(_BLOCK)
        if not more:
            raise _EndedError
        self._left += more


def _pass(body: Iterator[memoryview | bytes], to: _Peer, flip: bool) -> None:
    for block in body:
        if flip and len(block) > 0:
            changed = bytearray(block)
            changed[len(changed) // 2] ^= 1
            block, flip = bytes(changed), False
        to.send(block)


def _reset(client: _Peer) -> bool:
    # A zero linger time makes close() send RST, which clients see as "connection reset by peer".
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def _error(action: str, request: Request) -> bytes:
    status, reason, code, text = _ERRORS[action]
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{text}</Message>'
        f"<Resource>/{request.bucket}/{request.key}</Resource><RequestId>0</RequestId></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + (b"" if request.method == "HEAD" else body)


def _request(head: _Head) -> Request:
    target = urlsplit(head.first[1])
    bucket, _, key = unquote(target.path).removeprefix("/").partition("/")
    query = {name: values[0] for name, values in parse_qs(target.query, keep_blank_values=True).items()}
    kind = _kind(head, key, query)
    return Request(
        head.method, kind, bucket, query.get("prefix", "") if kind == "list" else key, query, head.fields
    )


def _kind(head: _Head, key: str, query: dict[str, str]) -> str:
    upload = "uploadId" in query
    if head.method == "GET":
        return "other" if upload or "uploads" in query else "get" if key else "list"
    if head.method == "HEAD":
        return "head" if key else "other"
    if head.method == "PUT" and key:
        return "part" if upload else "copy" if "x-amz-copy-source" in head.fields else "put"
    if head.method == "POST":
        return "begin" if "uploads" in query else "complete" if upload else "delete"
    if head.method == "DELETE":
        return "abort" if upload else "delete"
    return "other"


def wait_for(what: object, timeout: float = 10.0) -> None:
    """Wait until `what()` is true."""
    deadline = time.monotonic() + timeout
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
