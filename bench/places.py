"""Where saves are measured: a folder or a prefix in an S3 bucket, one for each measured process."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import StorageError

LOCAL = "s3:local"
"""In place of an address: a bucket of an object store that is started for the run."""


@dataclass(frozen=True)
class Prefix:
    """A place in a bucket, by its canonical address."""

    uri: str

    def __truediv__(self, name: str) -> Prefix:
        return Prefix(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri


Place = Path | Prefix
_LEADING_ELSEWHERE = ("CKPT_S3_ADDRESSING", "CKPT_S3_CREDENTIAL_COMMAND")


def in_bucket(storage: str) -> bool:
    """Whether that is an address in a bucket."""
    return storage.startswith("s3://")


def place_of(storage: str) -> Place:
    """The place at an absolute path or at an address in a bucket."""
    return Prefix(storage) if in_bucket(storage) else Path(storage)


@contextmanager
def temporary(storage: str, job: str) -> Iterator[str]:
    """A new, empty place in `storage` for `job`; it and all in it are gone afterwards."""
    if not in_bucket(storage):
        with tempfile.TemporaryDirectory(prefix=f"bench-{job}-", dir=storage) as folder:
            yield folder
        return
    name = f"bench-{job}-{uuid.uuid4().hex[:8]}"
    try:
        yield f"{storage}/{name}"
    finally:
        _remove(storage, name)


def _remove(storage: str, name: str) -> None:
    """Delete all below a name in a bucket, and what uploads that never ended hold; says so if it can't."""
    from ckpt.store import open_store

    try:
        store = open_store(storage)
        store.abort_uploads(lambda key: key.startswith(f"{name}/"))
        store.delete_tree(name)
    except StorageError as error:
        print(f"bench: {storage}/{name} is left behind: {error}", file=sys.stderr)


@contextmanager
def local_bucket(folder: Path) -> Iterator[str]:
    """The address of a bucket in an object store on this machine, which is there meanwhile and keeps its
    data below `folder`; the environment leads to it. Raises ObjectServerError if it can't be started.
    """
    from flows.object_server import ObjectServer

    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder, ignore_cleanup_errors=True) as data:
        server = ObjectServer(Path(data), bucket="bench")
        for name in [name for name in os.environ if name.startswith("AWS_") or name in _LEADING_ELSEWHERE]:
            del os.environ[name]
        server.start()
        os.environ.update(server.environment())
        try:
            yield f"s3://{server.bucket}"
        finally:
            server.stop()


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
