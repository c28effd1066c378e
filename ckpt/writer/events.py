"""What a writer process reports to its trainer."""

from dataclasses import dataclass, field, fields
from typing import Any

from ckpt.writer.messages import ProtocolError


@dataclass(frozen=True)
class Durable:
    """This rank's part of `attempt` is on storage, fsynced and size-checked.

    bytes: of the shard file. persist_s: from begin to durable. t: when, on the machine's monotonic clock.
    """

    attempt: str
    bytes: int
    persist_s: float
    t: float


@dataclass(frozen=True)
class Committed:
    """`attempt` is a checkpoint now. digest: of the manifest's bytes. t: when, on the monotonic clock."""

    attempt: str
    digest: str
    t: float


@dataclass(frozen=True)
class Failed:
    """`attempt` failed in `phase` ("persist" or "commit"); `error` names the first cause, `errno` its code.

    After a failed persist the attempt's files are removed; after a failed commit its parts stay whole.
    """

    attempt: str
    error: str
    errno: int | None = None
    phase: str = "persist"


@dataclass(frozen=True)
class FencedOff:
    """A newer launch holds the run: nothing of this launch will be committed any more. `by` says which."""

    attempt: str
    by: str


@dataclass(frozen=True)
class Pruned:
    """These attempts were asked to go; a deletion that failed is a line in `warnings`."""

    attempts: list[str]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Notice:
    """A line worth showing that changes nothing (such as: O_DIRECT is refused here)."""

    text: str


@dataclass(frozen=True)
class Exited:
    """The writer process is gone; nothing can be sent to it any more."""

    reason: str


Event = Durable | Committed | Failed | FencedOff | Pruned | Notice | Exited

_KINDS: dict[str, type] = {
    "durable": Durable,
    "committed": Committed,
    "failed": Failed,
    "fenced": FencedOff,
    "pruned": Pruned,
    "notice": Notice,
}


def from_message(message: dict[str, Any]) -> Event:
    """The event in a writer's message; ProtocolError if it is none."""
    kind = _KINDS.get(message["kind"])
    if kind is None:
        raise ProtocolError(f"the writer sent an unknown event {message['kind']!r}")
    known = {f.name for f in fields(kind)}
    try:
        event: Event = kind(**{name: value for name, value in message.items() if name in known})
    except TypeError as error:
        raise ProtocolError(f"the writer's event {message['kind']!r} is not whole: {error}") from error
    return event
