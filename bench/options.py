"""The command line, checked as a whole before anything is made."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.engines import ALWAYS, KEYS
from bench.places import LOCAL
from bench.spec import Spec, default_tensors, layer_width
from ckpt.errors import StorageError
from ckpt.stores import addresses
from ckpt.stores.options import S3Options
from flows.project import project_dir

MB = 10**6
_FEWEST_PAIRS, _FEWEST_QUICK = 24, 2
_LARGEST_MB = 10**6
_COPIES_KEPT = 3  # the newest, the one being written, and the one being deleted
_OTHER_SAVES = 24  # beside the pairs: a store on this machine frees what was deleted only minutes later


@dataclass(frozen=True)
class Options:
    """What was asked for. `spec.folder` is the storage, maybe `bench.places.LOCAL`; each measured process
    gets a folder or prefix of its own there.

    report: where the JSON goes, or None.
    """

    spec: Spec
    engines: tuple[str, ...]
    report: Path | None


def parse(arguments: list[str]) -> Options:
    """The options in `arguments`. Exits with code 2 and one clear line if they make no sense."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return _checked(given)
    except ValueError as error:
        parser.exit(2, f"bench: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure what a checkpoint costs training, beside other engines and the raw hardware.",
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures and samples there; plots (PNG) beside it")
    add("--quick", action="store_true", help="a small state and few pairs: shows that all runs, no figures")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add(
        "--engines",
        metavar="A,B",
        help=f"some of: {', '.join(KEYS)} (default: all; the first two always run)",
    )
    add("--size", metavar="MB", help="size of the state in 10^6 bytes (default 300; quick: 16)")
    add("--tensors", metavar="N", help="tensors of that size in all (default: of 4 MiB each)")
    add("--threads", default="1", metavar="N", help="threads that train (default 1)")
    add("--pairs", metavar="N", help="saves between two controls each (default 24, the fewest; quick: 6)")
    add("--every", default="", metavar="1,2,5", help="also: training time lost with a save every N steps")
    add(
        "--storage",
        metavar="PLACE",
        help="an existing folder on the disk to measure (default: runs/bench), s3://BUCKET/PREFIX, or "
        f"{LOCAL} for an object store that is started for the run",
    )
    return parser


def _checked(given: argparse.Namespace) -> Options:
    engines = _engines(given.engines)
    size = _number("--size", given.size, 16 if given.quick else 300, 1, _LARGEST_MB) * MB
    tensors = _number("--tensors", given.tensors, default_tensors(size), 3, 10**7)
    if layer_width(size, tensors) < 1:
        raise ValueError(f"--tensors: {size // MB} MB can't be cut into {tensors} tensors")
    fewest = _FEWEST_QUICK if given.quick else _FEWEST_PAIRS
    pairs = _number("--pairs", given.pairs, 6 if given.quick else _FEWEST_PAIRS, fewest, 10**5)
    every = tuple(_number("--every", text, 0, 1, 10**4) for text in given.every.split(",") if given.every)
    threads = _number("--threads", given.threads, 1, 1, 1024)
    _check_device(given.device)
    report = _report(given.json)
    storage = _storage(given.storage, size, pairs)
    disk = str(_default_disk())
    spec = Spec(size, tensors, threads, given.device, pairs, every, given.quick, storage, disk)
    return Options(spec, engines, report)


def _number(option: str, text: str | None, default: int, least: int, most: int) -> int:
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{option} takes whole numbers, not {text!r}") from None
    if not least <= value <= most:
        raise ValueError(f"{option} must be from {least} to {most}, not {value}")
    return value


def _engines(text: str | None) -> tuple[str, ...]:
    if text is None:
        return KEYS
    asked = text.split(",")
    unknown = [key for key in asked if key not in KEYS]
    if unknown:
        raise ValueError(f"--engines: there is no {unknown[0]!r}; there are {', '.join(KEYS)}")
    return tuple(key for key in KEYS if key in asked or key in ALWAYS)


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is cpu or cuda, not {device!r}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here")


def _report(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--json: {text} is no file in a folder that is there")
    return path


def _storage(text: str | None, size: int, pairs: int) -> str:
    bucket = None if text is None or Path(text).is_dir() else _bucket(text)
    if bucket is None:
        path = _default_disk() if text is None else Path(text).absolute()
        if text is not None and not (path.is_dir() and os.access(path, os.W_OK)):
            raise ValueError(f"--storage: {text} is no folder that can be written")
    else:
        path = _default_disk()
    kept = _COPIES_KEPT if bucket != LOCAL else pairs + _OTHER_SAVES
    _check_free(path, kept * size)
    return bucket or str(path)


def _bucket(text: str) -> str | None:
    """The canonical address if it is one in a bucket, or LOCAL. Raises ValueError for what looks like one."""
    if text == LOCAL:
        return text
    try:
        place = addresses.parse(text)
        if isinstance(place, addresses.Remote):
            raise ValueError(f"--storage: {text} can't be measured: give a folder or s3://BUCKET/PREFIX")
        if isinstance(place, addresses.Folder):
            return None
        S3Options.from_environment()
    except StorageError as error:
        raise ValueError(f"--storage: {error}") from None
    return place.uri


def _default_disk() -> Path:
    return project_dir() / "runs" / "bench"


def _check_free(path: Path, needed: int) -> None:
    there = next(place for place in (path, *path.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{there} has {free // MB} MB free, this takes {needed // MB}: see --storage, --size"
        )
