"""Where saves are measured: a folder or a prefix in an S3 bucket, one for each measured process."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.spec import Spec
from ckpt.errors import StorageError

LOCAL = "s3:local"
"""In place of an address: an object store that is started on this machine, anew for each process."""
_LEADING_ELSEWHERE = ("CKPT_S3_ADDRESSING", "CKPT_S3_CREDENTIAL_COMMAND")


@dataclass(frozen=True)
class Prefix:
    """A place in a bucket, by its canonical address. `disk`: where a store on this machine keeps its data."""

    uri: str
    disk: Path | None = None

    def __truediv__(self, name: str) -> Prefix:
        return Prefix(f"{self.uri}/{name}", self.disk)

    def __str__(self) -> str:
        return self.uri


Place = Path | Prefix


def in_bucket(storage: str) -> bool:
    """Whether that is an address in a bucket, or LOCAL."""
    return storage.startswith(("s3://", LOCAL))


def place_of(spec: Spec) -> Place:
    """The place that a measured process was given."""
    if not in_bucket(spec.folder):
        return Path(spec.folder)
    return Prefix(spec.folder, Path(spec.store_disk) if spec.store_disk else None)


@contextmanager
def temporary(spec: Spec, job: str) -> Iterator[Spec]:
    """The spec with a new, empty place in its storage for `job`; it and all in it are gone afterwards.

    Raises ObjectServerError if the storage is LOCAL and can't be started.
    """
    if spec.folder == LOCAL:
        with _local_bucket(spec.disk, job) as given:
            yield replace(spec, folder=f"{given}/{job}", store_disk=str(given.disk))
    elif in_bucket(spec.folder):
        name = f"bench-{job}-{uuid.uuid4().hex[:8]}"
        try:
            yield replace(spec, folder=f"{spec.folder}/{name}")
        finally:
            _remove(spec.folder, name)
    else:
        with tempfile.TemporaryDirectory(prefix=f"bench-{job}-", dir=spec.folder) as folder:
            yield replace(spec, folder=folder)


@contextmanager
def _local_bucket(disk: str, job: str) -> Iterator[Prefix]:
    """A bucket of an object store that runs on this machine meanwhile, with its data in a folder below
    `disk`; the environment leads to it.
    """
    from flows.object_server import ObjectServer

    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix=f"bench-{job}-", dir=disk) as folder:
        server = ObjectServer(Path(folder), bucket="bench")
        try:
            server.start()
            for name in before:
                if name.startswith("AWS_") or name in _LEADING_ELSEWHERE:
                    del os.environ[name]
            os.environ.update(server.environment())
            yield Prefix(f"s3://{server.bucket}", Path(folder))
        finally:
            server.stop()
            os.environ.clear()
            os.environ.update(before)


def check(storage: str) -> None:
    """Write, read and delete a small object in a bucket. Raises StorageError if that can't be done."""
    from ckpt.store import open_store

    store = open_store(storage)
    key, content = f"bench-check-{uuid.uuid4().hex[:8]}", b"bench"
    store.put(key, content)
    try:
        if store.read(key) != content:
            raise StorageError(f"{storage}: what was read back is not what was written")
    except FileNotFoundError as error:
        raise StorageError(f"{storage}: what was written is not there") from error
    finally:
        store.delete(key)


def _remove(storage: str, name: str) -> None:
    """Delete all below a name in a bucket, and what uploads that never ended hold; says so if it can't."""
    from ckpt.store import open_store

    try:
        store = open_store(storage)
        store.abort_uploads(lambda key: key.startswith(f"{name}/"))
        store.delete_tree(name)
    except StorageError as error:
        print(f"bench: {storage}/{name} is left behind: {error}", file=sys.stderr)
