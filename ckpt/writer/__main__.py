"""`python -m ckpt.writer FD`: a writer process on the socket that it inherited as file descriptor FD.

It leaves its trainer's session and process tree before anything else: what kills those leaves it alive.
"""

import faulthandler
import os
import signal
import sys


def main() -> None:
    """Detach, then serve; never returns."""
    fd = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    trainer = _watch(os.getppid())
    os.setsid()
    if os.fork() != 0:
        os._exit(0)

    import socket

    from ckpt import faults

    faults.name_process("writer")
    from ckpt.writer.priority import Session
    from ckpt.writer.serve import serve

    status = 1
    try:
        status = serve(socket.socket(fileno=fd), trainer, Session(own=True))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # no thread that hangs in the storage may keep the process


def _watch(trainer: int) -> int | None:
    """A descriptor that becomes readable when the trainer ends, whoever inherits its socket."""
    try:
        return os.pidfd_open(trainer)
    except OSError:
        return None  # refused by an old kernel or a sandbox: the end of the socket has to do


if __name__ == "__main__":
    main()
