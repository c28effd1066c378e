"""Which storage errors pass by themselves, and how long to wait for that."""

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ckpt.errors import StorageError

T = TypeVar("T")

TRANSIENT = frozenset(
    {
        errno.EINTR,
        errno.EAGAIN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ENOTCONN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
_FIRST_S = 0.05
_LONGEST_S = 5.0


def errno_of(error: BaseException) -> int | None:
    """The operating system's code behind an error, followed through its causes."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        seen = seen.__cause__
    return None


def retrying(work: Callable[[], T], deadline_s: float, pause: Callable[[float], None]) -> T:
    """Do `work`, again with growing, jittered pauses while it fails for a transient reason.

    Gives up with the latest error `deadline_s` after the first failure. `pause` sleeps and may raise.
    """
    wait = _FIRST_S
    until: float | None = None
    while True:
        try:
            return work()
        except (OSError, StorageError) as error:
            now = time.monotonic()
            until = now + deadline_s if until is None else until
            if errno_of(error) not in TRANSIENT or now >= until:
                raise
        pause(min(wait * random.uniform(0.5, 1.5), max(0.0, until - now)))
        wait = min(_LONGEST_S, wait * 2)
