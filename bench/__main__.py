"""`python -m bench`: every engine in a process of its own, one after the other; the table at the end.

Exit codes: 0 good, 1 discarded or something failed, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench import children, plots, report, results
from bench.children import Outcome
from bench.engines import NULL, OWN, UPLOAD, unfit_for_buckets
from bench.options import Options, parse
from bench.places import check, in_bucket
from bench.spec import FAILING, FOLDER, LIMITS, Spec
from ckpt.errors import StorageError
from flows.object_server import ObjectServerError


def main(arguments: list[str]) -> int:
    """Measure what was asked for and show it; the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        in_use = options.spec.disk if in_bucket(options.spec.folder) else options.spec.folder
        with children.storage(Path(in_use)):
            if options.spec.folder.startswith("s3://"):
                check(options.spec.folder)
            return _measure(options)
    except (StorageError, ObjectServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was made is removed", file=sys.stderr)
        return 130


def _measure(options: Options) -> int:
    spec = options.spec
    begun = time.monotonic()

    def progress(job: str, phase: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {job}: {phase}", file=sys.stderr, flush=True)

    found = [children.measure(LIMITS, spec, partial(progress, LIMITS))]
    if found[0].status != "ok":
        print(f"bench: the limits could not be measured: {found[0].reason}", file=sys.stderr)
        return 1
    spec = spec.settled(found[0].figures["batch"], found[0].figures["window"])
    outcomes = {}
    failing = None
    beside = {}
    for key in options.engines:
        unfit = unfit_for_buckets(key) if in_bucket(spec.folder) else None
        if unfit is None:
            outcomes[key] = children.measure(key, spec, partial(progress, key))
        else:
            outcomes[key] = Outcome("absent", unfit)
        if outcomes[key].status != "ok":
            progress(key, f"{outcomes[key].status}: {outcomes[key].reason}")
        elif key == OWN:
            failing = children.measure(FAILING, spec, partial(progress, FAILING))
            if in_bucket(spec.folder):
                beside = _beside(spec, progress)
    if not spec.quick:  # once more: what the machine allows, and its noise, may change within minutes
        again = replace(spec, windows_only=True)
        null = children.measure(NULL, again, partial(progress, f"{NULL} again"))
        outcomes[NULL] = results.joined(outcomes[NULL], null)
        found.append(children.measure(LIMITS, spec, partial(progress, f"{LIMITS} again")))
    limits = results.pooled([limit.figures for limit in found if limit.status == "ok"])
    summary = results.summarize(spec, limits, outcomes, failing, beside)
    print(report.table(summary))
    if options.report is not None:
        options.report.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        drawn = plots.draw(summary, options.report)
        print("\n".join(f"written: {path}" for path in (options.report, *drawn)))
    return 0 if summary["valid"] else 1


def _beside(spec: Spec, progress: Callable[[str, str], None]) -> dict[str, Outcome]:
    """What the own engine's figures in a bucket are held against."""
    brief = replace(spec, windows_only=True)
    return {
        UPLOAD: children.measure(UPLOAD, brief, partial(progress, UPLOAD)),
        FOLDER: children.measure(OWN, replace(brief, folder=spec.disk), partial(progress, FOLDER)),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
