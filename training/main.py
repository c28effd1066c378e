"""A rank's entry point, run by torchrun.

Output, the control socket and signals are in place before anything slow is imported, so that a stop is
honoured and a failure is told from the first moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from training import output
from training.control import Control
from training.group import Group
from training.spec import CONFIG, CONTROL, OWNER, PREEMPTED
from training.stop import Stop, StopRequested

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Connect, then train; see ``train``."""
    job = json.loads(Path(os.environ[CONFIG]).read_bytes())
    group = Group.from_environment()
    folder = Path(job["log_dir"] or Path(os.environ[CONFIG]).parent)
    folder /= f"{output.unsettled(os.environ.get(OWNER, 'x'))}{group.restart}"
    log = output.redirect(folder, group.rank)
    control = Control(os.environ.get(CONTROL), group.rank, group.restart, str(log), os.getpid())
    stop = Stop()
    stop.install()
    control.listen(stop.request)
    try:
        return train(job, group, log, control, stop)
    finally:
        if control.flow_gone and group.rank == 0:
            # Nobody else is left to remove the launch's private folder, which holds its whole configuration.
            shutil.rmtree(Path(os.environ[CONFIG]).parent, ignore_errors=True)
        control.close()


def train(job: dict[str, Any], group: Group, log: Path, control: Control, stop: Stop) -> int:
    """Train as the job file says. 0: finished, preempted, refused or fenced; 1: failed.

    Torch elastic restarts a rank that ends with another code, which would be wrong after any of the first.
    """
    session = None
    try:
        with stop.interruptible():
            from training.session import Session

            session = Session(job, group, control, stop)
            session.begin()
        assert session.launch is not None
        if group.rank == 0:
            output.settle(log.parent, session.launch)
        control.event("log", log=str(log.parent.with_name(f"{session.launch:05d}") / log.name))
        session.train()
    except StopRequested:
        if session is None:
            control.event("end", outcome=stop.outcome, cause=stop.reason, step=None)
        else:
            session.ended(stop.outcome, stop.reason)
        return 0 if stop.outcome == PREEMPTED else 1
    except Exception as error:
        traceback.print_exc()
        step = None if session is None else session.progress.step
        control.event("error", type=type(error).__name__, message=str(error), step=step)
        if session is not None:
            with contextlib.suppress(Exception):
                session.failed(f"rank {group.rank}: {type(error).__name__}: {error}")
        return 0 if type(error).__name__ in ("RunBusy", "Fenced") else 1
    return 0 if stop.outcome == PREEMPTED else 1


def own_session(torchrun: int) -> None:
    """Leave torchrun's session, and live on when it dies: the control socket tells then what to do."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    end_with(torchrun, 0)


def end_with(parent: int, number: int) -> None:
    """Have the kernel send signal ``number`` when ``parent`` dies; 0 sends nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if number and os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    torchrun = os.getppid()
    own_session(torchrun)
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed and recorded. Torchrun now waits for the result, and this process for torchrun to take it.
    end_with(torchrun, signal.SIGKILL)
    sys.exit(code)
