"""The command lines of the flows: what is typed, the order in which things start, and what is returned to
the shell.

The ranks are started first, then Prefect's server, and only then is Prefect imported: they need seconds
each, and none needs the others for its start.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError
from flows import overrides as ov
from flows import plan as planning
from flows import prefect_home, summary
from flows.config import compose, load, register_resolvers
from flows.interrupts import EXIT_CODE, Interrupts
from flows.overrides import ConfigError
from flows.plan import Plan
from flows.session import Session
from flows.terminal import Terminal

# Codes for the shell; 130 is Ctrl-C's, 143 SIGTERM's.
OK, FAILED, WRONG_USE, TERMINATED = 0, 1, 2, 143


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run `python -m flows.<name>` with the given arguments, and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if _is_sweep(args):
            return _sweep(name, [a for a in args if a not in ("-m", "--multirun")])
        if any(a.startswith("-") for a in args):
            return _hydra(name, args)
        return _COMMANDS[name](args, process_start())
    except (ConfigError, CheckpointError) as error:
        print(f"{error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError) else FAILED


def process_start() -> float:
    """When this process was started, on the monotonic clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - max(0.0, now - ticks / os.sysconf("SC_CLK_TCK"))


def _is_sweep(args: Sequence[str]) -> bool:
    return any(a in ("-m", "--multirun") for a in args)


def _sweep(name: str, args: list[str]) -> int:
    """One run after the other; every one of them is checked before the first starts."""
    if name != "train":
        raise ConfigError("-m starts one run for each combination, which only train can do")
    jobs = ov.jobs(args)
    for job in jobs:
        load("train", job)
    worst = OK
    for number, job in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        code = _train(job, process_start() if number == 1 else time.monotonic())
        if code in (EXIT_CODE, TERMINATED):
            return code
        worst = max(worst, code)
    return worst


def _hydra(name: str, args: list[str]) -> int:
    """What Hydra does by itself: --help, --cfg, --info, shell completion. None of it starts a flow."""
    import hydra

    for arg in args:
        if arg.split("=")[0] in ("-cn", "--config-name", "-cd", "--config-dir", "-cp", "--config-path"):
            raise ConfigError(
                f"{arg}: configs are composed from conf/; put your own into conf/local or conf/experiment"
            )
    flags = [i for i, a in enumerate(args) if a.startswith("-")]
    values = {i + 1 for i in flags if args[i] in ("--cfg", "-c", "--info", "-i", "--package", "-p")}
    words = [i for i in range(len(args)) if i not in flags and i not in values]
    texts = [args[i] for i in words]
    if "--cfg" in args or "-c" in args:
        if name != "train":
            options = planning.RESUME_OPTIONS if name == "resume" else planning.EVALUATE_OPTIONS
            texts = _with_saved(texts, options)
        compose(name, ov.normalise(texts))
    sys.argv = [sys.argv[0], *(args[i] for i in sorted({*flags, *values})), *ov.normalise(texts)]
    register_resolvers()

    def unused(_: Any) -> None:
        raise ConfigError(f"{' '.join(args)} starts nothing by itself; see --help")

    unused.__doc__ = None
    hydra.main(config_path="pkg://conf", config_name=name, version_base="1.3")(unused)()
    return OK


def _with_saved(texts: list[str], names: Sequence[str]) -> list[str]:
    """The overrides a resumed or evaluated run is composed from, with the command's own options."""
    from ckpt.launches import list_launches

    options, rest = ov.take(ov.normalise(texts), names)
    if "run" not in options:
        return texts
    saved = planning.saved_overrides(list_launches(planning.find_run(options, rest).store))
    return [*ov.merged(saved, rest), *(f"{key}={ov.quote(value)}" for key, value in options.items())]


def _train(args: list[str], began: float) -> int:
    options, _ = ov.take(args, ("run",))
    name = options.get("run")
    if name is None:
        name = planning.unused_name(args)
        args = [*args, f"run={name}"]
    plan = planning.plan_train(args, planning.new_owner(), name)
    return _run("train", plan, args, began)


def _resume(args: list[str], began: float) -> int:
    plan = planning.plan_resume(args)
    return _run("resume", plan, args, began)


def _evaluate(args: list[str], began: float) -> int:
    del began
    target = planning.plan_evaluate(args)
    server = _server()
    try:
        from flows import prefect_flows

        if server is not None:
            server.wait()
        run = target.plan.name
        state = prefect_flows.call("evaluate", run, run=run, which=target.which, overrides=target.new)
        return OK if state.is_completed() else FAILED
    except KeyboardInterrupt:
        return EXIT_CODE
    finally:
        if server is not None:
            atexit.unregister(server.stop)
            atexit.register(server.stop)


def _run(name: str, plan: Plan, args: list[str], began: float) -> int:
    """Train what was planned under a flow run of Prefect."""
    terminal = Terminal()
    if not plan.finished:
        terminal.line(plan.opening())
    for note in plan.notes:
        terminal.line(note)
    session = Session(plan, terminal, began)
    server: list[prefect_home.OwnServer] = []
    interrupts = Interrupts(_stopper(session), lambda: _leave(session, server))
    interrupts.install()
    if not plan.finished:
        session.start()
    own = _server()
    if own is not None:
        server.append(own)
    from flows import prefect_flows

    try:
        ready = own is None or own.wait(interrupts.seen)
    except prefect_home.ServerError as error:
        session.stop("Prefect is not available")
        session.done.wait()
        terminal.line(f"{error}\n{summary.stopped(session)}")
        return FAILED
    if not ready:
        session.done.wait()
        terminal.line(summary.stopped(session))
        return EXIT_CODE
    prefect_flows.hand_over(session)
    parameters = {"overrides": args} if name == "train" else {"run": plan.name, "overrides": args}
    try:
        state = prefect_flows.call(name, plan.name, **parameters)
    except Exception as error:
        # Nobody answers at the configured address, or not as Prefect does: no flow run, so no training
        # either.
        session.stop("Prefect is not available")
        session.done.wait()
        terminal.line(f"Prefect failed: {type(error).__name__}: {error}\n{summary.stopped(session)}")
        return FAILED
    if interrupts.seen():
        return EXIT_CODE
    return OK if state.is_completed() else TERMINATED if state.is_cancelled() else FAILED


def _server() -> prefect_home.OwnServer | None:
    if not prefect_home.configure():
        return None
    server = prefect_home.OwnServer()
    # Before Prefect is imported: what Prefect registers for the end of this process still needs the server.
    atexit.register(server.stop)
    server.start()
    return server


def _stopper(session: Session) -> Callable[[], None]:
    def stop() -> None:
        session.terminal.line("saving and stopping; Ctrl-C once more leaves at once")
        session.stop("Ctrl-C")

    return stop


def _leave(session: Session, server: list[prefect_home.OwnServer]) -> None:
    session.abandon()
    for each in server:
        each.kill()


_COMMANDS: dict[str, Callable[[list[str], float], int]] = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
}
