"""Names of everything in a run. Text only: nothing here touches storage."""

import re
import secrets

RUN_FILE = "run.json"
LAUNCHES = "launches"
PINS = "pins"
LOGS = "logs"
MANIFEST = "manifest.json"
DOOMED = "doomed.json"
MAX_STEP = 10**15 - 1

_SAFE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_ATTEMPT = re.compile(r"step-([0-9]{9,15})-([0-9]{5,9})-([0-9a-f]{4,32})")
_OF_LAUNCH = re.compile(r"([0-9]{5,9})\..+")
_LAUNCH = re.compile(r"([0-9]{5,9})\.json")
_SHARD = re.compile(r"rank-([0-9]{5,7})\.safetensors")
_PART = re.compile(r"rank-([0-9]{5,7})\.json")


def is_safe(name: str) -> bool:
    """Whether `name` is one plain path part made of `[A-Za-z0-9._-]`, and neither hidden nor `..`."""
    return _SAFE.fullmatch(name) is not None and not name.startswith(".")


def attempt_name(step: int, launch: int, count: int = 0, token: str | None = None) -> str:
    """A new, never reused folder name for one attempt at the checkpoint of `step`.

    `count` grows with every attempt of the launch: of two at one step, the later one's name sorts last.
    """
    return f"step-{step:09d}-{launch:05d}-{count:06x}{token or secrets.token_hex(4)}"


def parse_attempt(name: str) -> tuple[int, int] | None:
    """`(step, launch)` of an attempt's folder name, or None if `name` isn't one."""
    found = _ATTEMPT.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def shard_name(rank: int) -> str:
    """File name of a rank's tensors inside an attempt's folder."""
    return f"rank-{rank:05d}.safetensors"


def part_name(rank: int) -> str:
    """File name of a rank's part of the manifest inside an attempt's folder."""
    return f"rank-{rank:05d}.json"


def shard_rank(name: str) -> int | None:
    """The rank whose tensors a file name says it holds, or None."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else None


def part_rank(name: str) -> int | None:
    """The rank whose part of the manifest a file name says it holds, or None."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found else None


def launch_file(number: int, kind: str = "json") -> str:
    """Key of a launch's file: `kind` is `json`, `parent.json`, `end.json` or `beat`."""
    return f"{LAUNCHES}/{number:05d}.{kind}"


def parse_launch(name: str) -> int | None:
    """Number of the launch that a file `launches/NAME` opens, or None if it opens none."""
    found = _LAUNCH.fullmatch(name)
    number = int(found[1]) if found else 0
    return number if number > 0 and name == f"{number:05d}.json" else None


def launch_of(name: str) -> int:
    """Number of the launch that anything named `launches/NAME` belongs to, 0 if to none."""
    found = _OF_LAUNCH.fullmatch(name)
    number = int(found[1]) if found else 0
    return number if name.startswith(f"{number:05d}.") else 0


def join(uri: str, name: str) -> str:
    """Address of `name` inside the folder `uri`."""
    return f"{uri.rstrip('/')}/{name}"


def split_checkpoint(uri: str) -> tuple[str, str] | None:
    """`(run address, attempt)` if a canonical `uri` names an attempt's folder, else None."""
    head, _, tail = uri.rstrip("/").rpartition("/")
    # A whole bucket may bear such a name, too.
    return (head or "/", tail) if parse_attempt(tail) and not head.endswith(":/") else None
