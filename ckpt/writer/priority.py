"""Low priority for the writer's work, so that it stays out of training's way.

A thread's priority is never raised again: raising needs a privilege. Whoever wants to go faster starts fresh
threads from one that was never lowered.

Where the kernel groups processes by session (autogroup), a session gets as much CPU as any other, however low
the priority of its threads: there the writer's session, which is its own, has to be lowered as a whole. That
can be taken back without a privilege.
"""

import ctypes
import errno
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path

_NICE = 10
_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 3
_PAUSE_S = 0.06
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282, "riscv64": 30}
_WHO_PROCESS = 1
_CLASS_IDLE = 3 << 13


def lower_this_thread() -> None:
    """Give this thread less CPU than training gets, and disk time that nobody else wants."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, _WHO_PROCESS, thread, _CLASS_IDLE)


def start_obstore_low() -> None:
    """Have obstore make the threads that sign, encrypt and send: they keep the priority of their maker."""

    def start() -> None:
        import obstore
        from obstore.store import MemoryStore

        lower_this_thread()
        obstore.put(MemoryStore(), "nothing", b"", use_multipart=False)

    maker = threading.Thread(target=start, daemon=True)
    maker.start()
    maker.join()


class Session:
    """The priority of this process's session; `own` says that no other process's work goes by it."""

    def __init__(self, own: bool) -> None:
        self._own = own
        self._nice = 0

    def lower(self) -> None:
        """Give the session less CPU than training's gets."""
        self._set(_NICE)

    def restore(self) -> None:
        """Give the session its full share again."""
        self._set(0)

    def _set(self, nice: int) -> None:
        if not self._own or nice == self._nice:
            return
        for _ in range(_TRIES):
            try:
                _AUTOGROUP.write_text(str(nice), encoding="ascii")
                self._nice = nice
                return
            except OSError as error:
                # Without a privilege, one change in a tenth of a second is allowed on the whole machine.
                if error.errno != errno.EAGAIN:
                    self._own = False  # no such thing on this system
                    return
                time.sleep(_PAUSE_S)
