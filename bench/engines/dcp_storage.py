"""How `torch.distributed.checkpoint` reaches a folder, and a bucket by way of fsspec and s3fs."""

from __future__ import annotations

import shutil
from functools import lru_cache
from typing import Any

import torch.distributed.checkpoint as dcp

from bench.places import Place, Prefix
from bench.workload import Workload
from ckpt.stores.credentials import source_of
from ckpt.stores.options import S3Options


def saving(place: Place) -> dict[str, Any]:
    """The arguments of a save to `place`."""
    if not isinstance(place, Prefix):
        return {"checkpoint_id": place}
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    # What a bucket has taken is durable; to sync the files of this machine as well would only cost time.
    return {"storage_writer": FsspecWriter(place.uri, sync_files=False, **_s3fs_options())}


def load(place: Place, target: Workload) -> None:
    """Load in place."""
    where: dict[str, Any] = {"checkpoint_id": place}
    if isinstance(place, Prefix):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        where = {"storage_reader": FsspecReader(place.uri, **_s3fs_options())}
    dcp.load(dict(target.tensors()), no_dist=True, **where)


def remove(place: Place) -> None:
    """Delete one checkpoint."""
    if not isinstance(place, Prefix):
        shutil.rmtree(place, ignore_errors=True)
        return
    from fsspec.core import url_to_fs

    storage, path = url_to_fs(place.uri, **_s3fs_options())
    storage.rm(path, recursive=True)
    # Stores that keep objects in a file system go on listing the empty folder; others have no such object.
    storage.rm_file(path)


def way(place: Place) -> str:
    """What a title says of the way to `place`."""
    return ", s3fs" if isinstance(place, Prefix) else ""


@lru_cache(maxsize=1)
def _s3fs_options() -> dict[str, Any]:
    """The same endpoint, keys and certificates as all else here; sizes and concurrency are s3fs's own."""
    options = S3Options.from_environment()
    source = source_of()
    found: dict[str, Any] = {
        "endpoint_url": options.endpoint,
        "client_kwargs": {"region_name": options.region},
        "config_kwargs": {
            "s3": {"addressing_style": "virtual" if options.virtual_hosted else "path"},
            "request_checksum_calculation": "when_supported" if options.checksums else "when_required",
        },
    }
    if options.ca_bundle is not None:
        found["client_kwargs"]["verify"] = str(options.ca_bundle)
    if source is not None:
        keys = source.read()
        found |= {"key": keys.access_key_id, "secret": keys.secret_access_key, "token": keys.token}
    return found
