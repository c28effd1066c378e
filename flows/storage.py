"""Where runs are stored, as the config says: the address of their root, and the environment that leads every
process of a run to an object store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt.errors import StorageError
from flows.overrides import ConfigError, split

# The setting under storage.s3 and the variable that the engine reads in every process.
_VARIABLES = {
    "endpoint": "AWS_ENDPOINT_URL",
    "region": "AWS_REGION",
    "addressing": "CKPT_S3_ADDRESSING",
    "ca_bundle": "AWS_CA_BUNDLE",
    "checksums": "AWS_REQUEST_CHECKSUM_CALCULATION",
    "part_mib": "CKPT_S3_PART_MIB",
    "parts_in_flight": "CKPT_S3_PARTS_IN_FLIGHT",
    "deadline_s": "CKPT_S3_DEADLINE_S",
}
# Without these a command finds another store, or none.
_LEADING = ("AWS_ENDPOINT_URL", "AWS_REGION", "CKPT_S3_ADDRESSING", "AWS_CA_BUNDLE")
_KEY = re.compile(r"token|secret|passw|access_?key|key_?id|credential|session", re.IGNORECASE)
_NODES = ("storage.", "launcher.env.AWS_", "launcher.env.CKPT_S3_")

# What the variables were before the config set them; None for one that was not set.
_before: dict[str, str | None] = {}


def root_of(settings: Mapping[str, Any]) -> str:
    """The canonical address under which runs are, of a checked `storage` node.

    Sets the variables of an object store in this process, for all that it starts; a setting that is null
    leaves the variable as you have set it. Touches no storage. ConfigError or StorageError for what can't
    work.
    """
    from ckpt.stores.addresses import Folder, parse

    wanted = _environment(settings)
    root = str(settings["root"])
    if settings.get("s3") is not None and not root.startswith("s3:"):
        raise ConfigError(
            f"storage.root={root} is no address in an S3 store, which storage.s3 is for: give "
            "storage.root=s3://BUCKET/PREFIX, or choose storage=local for a folder"
        )
    place = parse(root)
    _set(wanted)
    if not isinstance(place, Folder):
        return place.uri
    if settings.get("requires") == "nfs":
        _require_nfs(place.path)
    return str(place.path)


def is_folder(uri: str) -> bool:
    """Whether a canonical address is that of a folder."""
    return uri.startswith("/")


def assignments() -> list[tuple[str, str]]:
    """The variables, set by the config, without which a command would not find the store."""
    return [(name, os.environ[name]) for name in _LEADING if name in _before and name in os.environ]


def refuse_keys(overrides: Iterable[str] = (), values: Mapping[str, Any] | None = None) -> None:
    """ConfigError for a key, secret or token among the settings of storage: a config is saved with its
    run."""
    from flows.config import flat_keys

    names = [split(text).key for text in overrides]
    names += flat_keys(values) if values is not None else ()
    for name in names:
        if name.startswith(_NODES) and _KEY.search(name.rpartition(".")[2]):
            raise ConfigError(
                f"{name}: keys don't belong into the config, which is saved with every run. Put them into "
                "the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or where AWS tools keep them "
                "(~/.aws/credentials and AWS_PROFILE)"
            )


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the settings ask for."""
    given = settings.get("s3") or {}
    wanted = {_VARIABLES[key]: f"{value}" for key, value in given.items() if value is not None}
    if "AWS_CA_BUNDLE" in wanted:
        # A process that is started elsewhere shall find the same file.
        wanted["AWS_CA_BUNDLE"] = str(Path(wanted["AWS_CA_BUNDLE"]).expanduser().absolute())
    if given:
        _check(wanted)
    return wanted


def _check(wanted: dict[str, str]) -> None:
    from ckpt.stores.options import S3Options

    try:
        S3Options.from_environment({**_own(), **wanted})
    except StorageError as error:
        text = str(error)
        for key, name in _VARIABLES.items():
            if name in wanted:
                text = re.sub(rf"\b{name}\b", f"storage.s3.{key}", text)
        raise ConfigError(text) from None


def _own() -> dict[str, str]:
    """The environment as it was before any config was applied."""
    own = {name: value for name, value in os.environ.items() if name not in _before}
    own.update({name: value for name, value in _before.items() if value is not None})
    return own


def _set(wanted: Mapping[str, str]) -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
    for name, value in wanted.items():
        _before[name] = os.environ.get(name)
        os.environ[name] = value
    if "AWS_ENDPOINT_URL" in wanted and "AWS_ENDPOINT_URL_S3" in os.environ:
        # It would win over the endpoint that the config names.
        _before["AWS_ENDPOINT_URL_S3"] = os.environ.pop("AWS_ENDPOINT_URL_S3")


def _require_nfs(root: Path) -> None:
    kind = _file_system(root, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    if not kind.startswith("nfs"):
        raise ConfigError(
            f"storage.root={root} is on no NFS mount but on {kind}: mount the file system first, or say "
            "storage=local if that is meant"
        )


def _file_system(path: Path, mounts: str) -> str:
    """The kind of file system that holds `path`, which need not exist, by /proc/self/mountinfo."""
    there = path
    while not there.exists():
        there = there.parent
    text = str(there.resolve())
    best, kind = "", "an unknown file system"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        inside = text == point or text.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one covers the earlier.
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
