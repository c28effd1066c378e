"""A rank's entry point: ``python -m torch.distributed.run ... -m training.main``.

Output, the control socket and signals are in place before anything slow is imported, so that a stop is
honoured and a failure is told from the first moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

from training import output
from training.control import Control
from training.group import Group
from training.spec import CONFIG, CONTROL, OWNER, PREEMPTED
from training.stop import Stop, StopRequested


def main() -> int:
    """Train as the job file says. 0: finished, preempted, refused or fenced; 1: failed.

    Torch elastic restarts a rank that ends with another code, which would be wrong after any of the first.
    """
    job = json.loads(Path(os.environ[CONFIG]).read_bytes())
    group = Group.from_environment()
    folder = Path(job["log_dir"] or Path(os.environ[CONFIG]).parent)
    folder /= f"launching-{os.environ.get(OWNER, 'x')[:12]}-{group.restart}"
    log = output.redirect(folder, group.rank)
    control = Control(os.environ.get(CONTROL), group.rank, group.restart, str(log), os.getpid())
    stop = Stop()
    stop.install()
    control.listen(stop.request)
    session = None
    try:
        with stop.interruptible():
            from training.session import Session

            session = Session(job, group, control, stop)
            session.begin()
        assert session.launch is not None
        if group.rank == 0:
            output.settle(folder, session.launch)
        control.event("log", log=str(folder.parent / f"{session.launch:05d}" / log.name))
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything has been closed; tearing down torch's modules would only take time.
    os._exit(code)
