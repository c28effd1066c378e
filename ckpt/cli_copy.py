"""The command `python -m ckpt cp`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ckpt import listing
from ckpt.copying import copy


def run(args: argparse.Namespace) -> tuple[int, str, Any]:
    """Copy, and say what was done: exit code 1 if a checkpoint could not be copied."""
    lines: list[str] = []

    def say(line: str) -> None:
        # With --json nothing but the document may come on the standard output.
        print(line, file=sys.stderr, flush=True) if args.json else lines.append(line)

    done = copy(args.uri, args.dest, say)
    speed = f"{listing.size_text(done.nbytes)} in {done.seconds:.2f} s"
    lines.append(f"{len(done.copied)} copied, {len(done.present)} there already ({speed}): {done.dest}")
    return 0 if done.ok else 1, "\n".join(lines), done.plain()
