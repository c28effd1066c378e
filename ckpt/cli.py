"""The command line over runs and checkpoints. Exit codes: 0 good, 1 found bad, 2 wrong use."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ckpt import cli_copy, listing, retention
from ckpt.checkpoint import Checkpoint
from ckpt.commit import posthumous
from ckpt.discover import committed, find
from ckpt.errors import CheckpointError, Corrupt, NotCommitted, RunBusy
from ckpt.launches import launch_numbers, read_launch
from ckpt.liveness import is_live
from ckpt.manifest import summary
from ckpt.names import split_checkpoint
from ckpt.pins import pin, pinned, unpin
from ckpt.run import Run, open_run
from ckpt.store import open_store
from ckpt.verification import as_checkpoint, verify

GOOD, BAD, WRONG_USE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints errors as text, without a traceback."""
    args = _parser().parse_args(argv)
    try:
        code, text, data = args.command(args)
        print(json.dumps(listing.plain(data), indent=2) if args.json else text)
        sys.stdout.flush()
    except (CheckpointError, ValueError) as error:
        return _report(args, error, BAD if isinstance(error, Corrupt) else WRONG_USE)
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except OSError as error:
        return _report(args, error, WRONG_USE)
    except KeyboardInterrupt:
        return 130
    return int(code)


def _report(args: argparse.Namespace, error: Exception, code: int) -> int:
    if args.json:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
    print(f"error: {error}", file=sys.stderr)
    return code


Result = tuple[int, str, Any]
Command = Callable[[argparse.Namespace], Result]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ckpt",
        description="Look at, verify and tend the checkpoints of a run.",
        epilog="A RUN is its folder; a CHECKPOINT is the folder of one, or RUN with --which. "
        "Exit codes: 0 good, 1 found bad, 2 wrong use.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, help: str, subject: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("uri", metavar=subject)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command)
        return sub

    which = "latest, step:N, tag:NAME, best:METRIC:min|max or a folder's name"
    add("ls", _ls, "List a run's checkpoints, newest first, or the runs in a folder.", "RUN")
    show = add("show", _show, "Show what a checkpoint says of itself.", "CHECKPOINT")
    check = add(
        "verify", _verify, "Compare a checkpoint, or all of a run, with the manifest.", "CHECKPOINT|RUN"
    )
    check.add_argument("--quick", action="store_true", help="by the sizes of files only")
    tag = add("tag", _tag, "Keep a checkpoint under a name.", "CHECKPOINT")
    tag.add_argument("name")
    for sub in (show, check, tag):
        sub.add_argument("--which", metavar="W", help=f"which one of a RUN: {which}")
    untag = add("untag", _untag, "Let go of a tagged checkpoint.", "RUN")
    untag.add_argument("name")
    copy = add("cp", cli_copy.run, "Copy a run, or a checkpoint into a run, to any storage.", "SOURCE")
    copy.add_argument("dest", metavar="DEST", help="the run to copy into; made if it isn't there")
    add("commit", _commit, "Commit what a dead launch left complete but for the manifest.", "RUN")
    prune = add("prune", _prune, "Delete old checkpoints of a run that nobody writes to.", "RUN")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    prune.add_argument("--keep-every", type=int, metavar="STEPS", help="keep multiples of STEPS")
    prune.add_argument("--keep-best", metavar="METRIC:min|max", help="keep the best one by a metric")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    return parser


def _ls(args: argparse.Namespace) -> Result:
    store = open_store(args.uri)
    try:
        run = open_run(args.uri, create=False)
    except NotCommitted:
        runs = listing.runs_in(store)
        if not runs:
            raise
        return GOOD, listing.runs_text(runs), {"runs": runs}
    data = listing.of_run(run)
    return GOOD, listing.run_text(data), data


def _show(args: argparse.Namespace) -> Result:
    checkpoint = _chosen(args, default="latest")
    try:
        data = {"uri": checkpoint.uri, **summary(checkpoint.manifest)}
    except NotCommitted as error:
        raise Corrupt(str(error)) from error
    return GOOD, listing.summary_text(data), data


def _verify(args: argparse.Namespace) -> Result:
    if args.which is None and split_checkpoint(open_store(args.uri).uri) is None:
        subjects = committed(open_run(args.uri, create=False))
    else:
        subjects = [_chosen(args)]
    reports = [verify(subject, args.quick) for subject in subjects]
    lines = []
    for report in reports:
        how = "sizes match" if args.quick else f"{listing.size_text(report.nbytes)} in {report.seconds:.2f} s"
        lines.append(f"good  {report.uri}  ({how})" if report.ok else f"BAD   {report.uri}")
        lines += [f"      {problem}" for problem in report.problems]
    code = GOOD if all(report.ok for report in reports) else BAD
    text = "\n".join(lines) or "there is no committed checkpoint to verify"
    return code, text, {"ok": code == GOOD, "reports": [asdict(report) for report in reports]}


def _tag(args: argparse.Namespace) -> Result:
    checkpoint = _chosen(args)
    run = open_run(checkpoint.run_uri, create=False)
    made = pin(run, args.name, checkpoint)
    return GOOD, f"{made.name} -> {checkpoint.uri}", {**asdict(made), "uri": checkpoint.uri}


def _untag(args: argparse.Namespace) -> Result:
    run = open_run(args.uri, create=False)
    if not unpin(run, args.name):
        raise NotCommitted(f"{run.uri} has no tag {args.name!r}")
    return GOOD, f"{args.name} is gone; its checkpoint may now be pruned", {"name": args.name}


def _commit(args: argparse.Namespace) -> Result:
    run = open_run(args.uri, create=False)
    last = _refuse_if_live(run)
    notes: list[str] = []
    done = posthumous(run, last + 1, say=notes.append)
    lines = [*(f"committed {attempt}" for attempt in done), *notes]
    data = {"committed": done, "problems": notes}
    return BAD if notes else GOOD, "\n".join(lines) or "there is nothing to commit", data


def _prune(args: argparse.Namespace) -> Result:
    from ckpt import policies

    rules: list[Any] = []
    if args.keep_last is not None:
        rules.append(policies.KeepLast(args.keep_last))
    if args.keep_every is not None:
        rules.append(policies.KeepEvery(args.keep_every))
    if args.keep_best is not None:
        metric, _, direction = args.keep_best.rpartition(":")
        rules.append(policies.KeepBest(metric, direction))
    if not rules:
        raise ValueError("say what to keep: --keep-last N, --keep-every STEPS, --keep-best METRIC:min|max")
    run = open_run(args.uri, create=False)
    last = _refuse_if_live(run)
    history, damaged = listing.facts(run)
    doomed = retention.doomed(history, policies.Any(*rules), pinned(run.store))
    if args.dry_run:
        text = "\n".join(f"would delete {attempt}" for attempt in doomed) or "there is nothing to delete"
        return GOOD, text, {"would_delete": doomed, "damaged": damaged}
    warnings = retention.prune(run.store, doomed, last)
    there = {item.attempt for item in committed(run)}
    gone = [attempt for attempt in doomed if attempt not in there]
    lines = [*(f"deleted {attempt}" for attempt in gone), *warnings]
    data = {"deleted": gone, "warnings": warnings, "damaged": damaged}
    return BAD if warnings else GOOD, "\n".join(lines) or "there is nothing to delete", data


def _chosen(args: argparse.Namespace, default: str | None = None) -> Checkpoint:
    which = args.which or default
    if split_checkpoint(open_store(args.uri).uri) is not None:
        if args.which:
            raise ValueError("--which chooses from a RUN, and a CHECKPOINT was given")
        return as_checkpoint(args.uri)
    run = open_run(args.uri, create=False)
    if which is None:
        raise ValueError(
            f"{run.uri} is a run: say which checkpoint with --which latest (or step:N), or give its folder"
        )
    return find(run, which)


def _refuse_if_live(run: Run) -> int:
    """The number of the last launch, 0 if there is none. Raises RunBusy if it lives."""
    numbers = launch_numbers(run.store)
    if not numbers:
        return 0
    last = read_launch(run.store, numbers[-1])
    found = is_live(run.store, last.number, last.info, ended=last.end is not None, say=_note)
    if found.live:
        raise RunBusy(
            f"{run.uri} is being written to by launch {last.number} (host {found.host}, pid {found.pid}), "
            f"which tends its checkpoints itself"
        )
    return last.number


def _note(text: str) -> None:
    print(text, file=sys.stderr)
