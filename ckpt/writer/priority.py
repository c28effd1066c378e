"""Low priority for single threads, so that the writer's work stays out of training's way.

Priority is set per thread and never raised again: raising needs a privilege. Whoever wants to go faster
starts fresh threads from one that was never lowered.
"""

import ctypes
import os
import platform
import threading
from contextlib import suppress

_NICE = 10
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
