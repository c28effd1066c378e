"""Faults on demand: rules that kill, fail, delay or cut a named operation, so that recovery can be tested.

The rules are a JSON list in the environment variable `CKPT_FAULTS`, so that ranks, their children and the
writer process all obey them. Each rule is `{"match", "nth", "do", "errno", "seconds"}`:

- `match`: a regular expression searched for in `process:operation:name`; process is `trainer` or `writer`;
- `nth`: the match at which the rule fires, counted from 1 in each process; 0 (the default) means every one;
- `do`: `kill` (SIGKILL of this process), `raise` (an OSError with `errno`, default EIO), `delay` (sleep for
  `seconds`) or `cut` (halve the file that was written, and report nothing).
"""

import errno as errno_codes
import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "CKPT_FAULTS"
_DEEDS = ("kill", "raise", "delay", "cut")


@dataclass
class Rule:
    """One fault: where it strikes, at which occurrence, and what it does."""

    pattern: re.Pattern[str]
    nth: int
    do: str
    errno: int
    seconds: float
    seen: int = 0


_process = "trainer"
_lock = threading.Lock()


def parse(text: str) -> list[Rule]:
    """Read rules from JSON text; a ValueError names the rule that is malformed."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(raw, list):
        raise ValueError(f"{VARIABLE} must be a JSON list of rules, not {type(raw).__name__}")
    return [_rule(item) for item in raw]


def _rule(item: Any) -> Rule:
    known = {"match", "nth", "do", "errno", "seconds"}
    if not isinstance(item, dict) or not {"match", "do"} <= set(item) <= known:
        raise ValueError(f"{VARIABLE}: a rule needs 'match' and 'do' and takes {sorted(known)}; got {item!r}")
    if item["do"] not in _DEEDS:
        raise ValueError(f"{VARIABLE}: 'do' must be one of {', '.join(_DEEDS)}; got {item['do']!r}")
    return Rule(
        pattern=re.compile(item["match"]),
        nth=int(item.get("nth") or 0),
        do=item["do"],
        errno=int(item.get("errno", errno_codes.EIO)),
        seconds=float(item.get("seconds", 0)),
    )


def name_process(name: str) -> None:
    """Say which process this is (`trainer` or `writer`) for the rules' patterns."""
    global _process
    _process = name


def point(op: str, name: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> None:
    """Let the rules strike at operation `op` on `name`; without rules this does nothing.

    `path` is the file that a `cut` halves, where `name` is not itself an absolute path.
    """
    if _rules:
        _strike(op, os.fspath(name), Path(name if path is None else path))


def _strike(op: str, name: str, path: Path) -> None:
    where = f"{_process}:{op}:{name}"
    for rule in _rules:
        if not rule.pattern.search(where):
            continue
        with _lock:
            rule.seen += 1
            due = rule.nth in (0, rule.seen)
        if due:
            _do(rule, where, path)


def _do(rule: Rule, where: str, path: Path) -> None:
    if rule.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.do == "raise":
        raise OSError(rule.errno, f"{os.strerror(rule.errno)} (fault rule at {where})", str(path))
    elif rule.do == "delay":
        time.sleep(rule.seconds)
    elif path.is_absolute() and path.is_file():
        os.truncate(path, path.stat().st_size // 2)


_rules: list[Rule] = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else []
