"""A checkpoint as a handle: where it is and what it says of itself, read when first asked for."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import Corrupt, NotCommitted
from ckpt.manifest import MAX_MANIFEST, Manifest, parse_manifest
from ckpt.names import MANIFEST, join
from ckpt.sealed import signing_key
from ckpt.store import Store, open_store


@dataclass(frozen=True)
class Fact:
    """What policies may know of one committed checkpoint; a history of them is newest first, in lineage
    order.
    """

    attempt: str
    step: int
    launch: int
    metrics: dict[str, Any]
    committed_at: dt.datetime


@dataclass(frozen=True)
class Checkpoint:
    """One attempt at `step`, made by `launch`; `abandoned` if the run went on from an earlier checkpoint
    instead.

    Being handed one doesn't prove it valid: `manifest` and what depends on it raise NotCommitted or Corrupt.
    """

    run_uri: str
    attempt: str
    step: int
    launch: int
    abandoned: bool = False
    run_id: str | None = field(default=None, compare=False)

    @property
    def uri(self) -> str:
        """The canonical address of the attempt's folder."""
        return join(self.run_uri, self.attempt)

    @property
    def store(self) -> Store:
        """The storage of the whole run."""
        return open_store(self.run_uri)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, read and checked once.

        Raises NotCommitted if there is none, Corrupt if it is damaged, not signed as asked for, or that of
        another checkpoint, NewerFormat if it is from a newer version, StorageError if it can't be read.
        """
        try:
            data = self.store.read(f"{self.attempt}/{MANIFEST}", MAX_MANIFEST)
        except FileNotFoundError as error:
            raise NotCommitted(f"{self.uri} is not committed: it has no {MANIFEST}") from error
        manifest = parse_manifest(data, signing_key(), f"{self.uri}/{MANIFEST}")
        if manifest.attempt != self.attempt:
            raise Corrupt(
                f"{self.uri} holds the manifest of {manifest.attempt}: it was put in the wrong place"
            )
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise Corrupt(
                f"{self.uri} belongs to the run with id {manifest.run_id}, not to this one ({self.run_id}): "
                f"it was put in the wrong place"
            )
        return manifest

    @property
    def committed_at(self) -> dt.datetime:
        """When the save began, by rank 0's clock, in UTC."""
        return dt.datetime.fromisoformat(self.manifest.created).astimezone(dt.UTC)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics given with the save."""
        return self.manifest.metrics

    @property
    def fact(self) -> Fact:
        """What policies may know of it."""
        return Fact(self.attempt, self.step, self.launch, self.metrics, self.committed_at)
