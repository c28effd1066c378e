"""A run in an S3 bucket."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import S3Store

from ckpt.errors import Corrupt, StorageError
from ckpt.exclusive import TEMPORARY
from ckpt.faults import point
from ckpt.store import Entry, Sink, Source
from ckpt.stores.addresses import Bucket
from ckpt.stores.client import Client, client_of
from ckpt.stores.multipart import MultipartSink
from ckpt.stores.options import S3Options
from ckpt.stores.ranges import RangeSource

_T = TypeVar("_T")
_SETTLE_S = 0.3
_BULK = 1000
_MD5 = re.compile(r"[0-9a-f]{32}")


class ObjectStore:
    """A prefix in a bucket. Folders exist as far as there are objects in them.

    For large objects: `raw` is obstore's store, to be used inside `call` only, with keys from `_key`.
    """

    def __init__(self, address: Bucket, options: S3Options | None = None) -> None:
        self._address = address
        self._client: Client = client_of(address.bucket, options or S3Options.from_environment())

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return self._address.uri

    @property
    def options(self) -> S3Options:
        return self._client.options

    @property
    def raw(self) -> S3Store:
        return self._client.raw

    def call(self, verb: str, key: str, work: Callable[[], _T], deadline_s: float | None = None) -> _T:
        """Do `work` with retries and plain errors, as `Client.call` says; `verb` fits "can't VERB KEY"."""
        return self._client.call(f"can't {verb} {self.uri}/{key}".rstrip("/"), work, deadline_s)

    def path(self, key: str) -> Path:
        raise StorageError(f"{self.uri}/{key} is in an object store and has no path in the file system")

    def read(self, key: str, limit: int | None = None) -> bytes:
        self._point("read", key)

        def get() -> bytes:
            found = obstore.get(self._client.once, self._key(key))
            size = found.meta["size"]
            if not found.meta["e_tag"]:
                raise GenericError("Unable to extract metadata: every object in a store has a tag")
            if limit is not None and size > limit:
                raise Corrupt(f"{self.uri}/{key} has {size} bytes, where at most {limit} make sense")
            return bytes(found.bytes())

        return self.call("read", key, get)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._point("read", key)
        if not into:
            return
        end = start + len(into)

        def get() -> bytes:
            return bytes(obstore.get_range(self._client.once, self._key(key), start=start, end=end))

        try:
            got = self.call("read", key, get)
        except StorageError:
            self._check_end(key, end)
            raise
        if len(got) != len(into):
            self._check_end(key, end)
            raise StorageError(f"{self.uri}/{key}: {len(into)} bytes were asked for, {len(got)} came")
        into[:] = got

    def size(self, key: str) -> int | None:
        self._point("size", key)
        try:
            found = self.call("look at", key, lambda: obstore.head(self._client.once, self._key(key)))
        except FileNotFoundError:
            return None
        return found["size"]

    def list(self, prefix: str = "") -> list[Entry]:
        self._point("list", prefix)
        place = self._key(prefix)

        def get() -> list[Entry]:
            # No cursor of an earlier try is gone on from: names may have come and gone meanwhile.
            found = obstore.list_with_delimiter(self._client.once, place or None)
            folders = [Entry(_last(name), True, 0) for name in found["common_prefixes"]]
            return folders + [
                Entry(_last(item["path"]), False, item["size"])
                for item in found["objects"]
                if item["path"] != place
            ]

        return [entry for entry in self.call("list", prefix, get) if not entry.name.startswith(TEMPORARY)]

    def create(self, key: str, data: bytes) -> bool:
        self._point("create", key)
        if self._client.creates_exclusively(self._key(key)):
            return self._create_only(key, data)
        if self.size(key) is not None:
            return False
        self._write(key, data)
        # Another creator may have put its own between the look and the write: the last one to write has won,
        # and all find that out once nobody's write is on its way any more.
        time.sleep(_SETTLE_S)
        return self._holds(key, data)

    def put(self, key: str, data: bytes, durable: bool = True) -> None:  # noqa: ARG002
        self._point("put", key)
        self._write(key, data)

    def delete(self, key: str) -> None:
        self._point("delete", key)
        try:
            self.call("delete", key, lambda: obstore.delete(self._client.once, self._key(key)))
        except FileNotFoundError:
            return

    def delete_tree(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"refusing to delete all of {self.uri}")
        self._point("delete", prefix)
        place = self._key(prefix)

        def below() -> list[str]:
            return [item["path"] for page in obstore.list(self._client.once, place) for item in page]

        keys = self.call("list", prefix, below)
        keys += _folders_of(keys, place)
        failed = [
            error
            for start in range(0, len(keys), _BULK)
            for error in self._delete_some(prefix, keys[start : start + _BULK])
        ]
        if failed:
            raise failed[0]

    def make_dir(self, key: str) -> None:
        self._point("mkdir", key)

    def remove_if_empty(self, key: str) -> None:
        with suppress(StorageError, FileNotFoundError):
            self.delete(key)

    def free(self) -> int | None:
        return None

    def abort_uploads(self, wanted: Callable[[str], bool]) -> int:
        provider = self._client.provider
        if provider is None:
            return 0  # only obstore knows the keys of a pod's or an instance's role
        # Imported here: only launches ask, and the writer process should start fast.
        from ckpt.stores.leftovers import Uploads

        folder = f"{self._address.prefix}/".lstrip("/")
        uploads = Uploads(self._address.bucket, self.options, provider.keys)
        return uploads.abort(folder, lambda key: wanted(key[len(folder) :]))

    def open_sink(self, key: str, size: int, *, direct: bool, say: Callable[[str], None]) -> Sink:  # noqa: ARG002
        options = self.options
        return MultipartSink(
            self.raw,
            self._key(key),
            size,
            lambda verb, work: self.call(verb, key, work),
            part=options.part_bytes,
            in_flight=options.parts_in_flight,
        )

    def open_source(self, key: str, *, direct: bool) -> Source:  # noqa: ARG002
        self._point("read", key)
        return RangeSource(
            lambda: self._client.once,
            self._key(key),
            lambda verb, work: self.call(verb, key, work),
            parallel=self.options.parts_in_flight,
        )

    def _key(self, key: str) -> str:
        """The full path of a key inside the bucket. Raises StorageError for no name inside the run."""
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise StorageError(f"{key!r} is not a name inside {self.uri}")
        return "/".join([self._address.prefix, *parts] if self._address.prefix else parts)

    def _point(self, operation: str, key: str) -> None:
        name = f"{self.uri}/{key}"
        self._key(key)
        try:
            point(operation, name)
        except OSError as error:
            raise StorageError(f"can't {operation} {name}: {error.strerror}") from error

    def _create_only(self, key: str, data: bytes) -> bool:
        tries = 0

        def put() -> bool:
            nonlocal tries
            tries += 1
            made = obstore.put(self._client.once, self._key(key), data, mode="create", use_multipart=False)
            return self._is_of(made["e_tag"], key, data)

        try:
            arrived = self.call("create", key, put)
        except AlreadyExistsError:
            # A try whose answer was lost may have made it: only the content tells that from somebody else's.
            return tries > 1 and self._holds(key, data)
        if not arrived:
            self._write(key, data)
        return True

    def _write(self, key: str, data: bytes) -> None:
        def put() -> None:
            made = obstore.put(self._client.once, self._key(key), data, use_multipart=False)
            if not self._is_of(made["e_tag"], key, data):
                raise GenericError("Unable to extract metadata: the answer is not about what was sent")

        self.call("write", key, put)

    def _is_of(self, tag: str | None, key: str, data: bytes) -> bool:
        """Whether what was stored, says its tag or the object itself, is what was sent."""
        text = (tag or "").strip('"')
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return not _MD5.fullmatch(text) or text == digest or self._holds(key, data)

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key, len(data)) == data
        except (FileNotFoundError, Corrupt):
            return False

    def _check_end(self, key: str, end: int) -> None:
        size = self.size(key)
        if size is not None and size < end:
            raise Corrupt(f"{self.uri}/{key} ends at byte {size}, before {end}")

    def _delete_some(self, prefix: str, keys: Sequence[str]) -> Iterator[StorageError]:
        """Delete objects; yields why one could not be."""

        def delete(store: S3Store, which: str | Sequence[str]) -> None:
            with suppress(FileNotFoundError):
                self.call("delete", prefix, lambda: obstore.delete(store, which))

        try:
            delete(self._client.bulk, keys)
        except StorageError:
            # Not every store knows the bulk request, and one key that can't go must not keep the others.
            for key in keys:
                try:
                    delete(self._client.once, key)
                except StorageError as error:
                    yield error


def _folders_of(keys: list[str], place: str) -> list[str]:
    """The folders that keys lie in, up to `place`, deepest first.

    Stores that keep objects in a file system list a folder on when all in it is gone, until it is deleted by
    its own name; elsewhere no such object exists, and deleting it changes nothing.
    """
    found = {place}
    for key in keys:
        parts = key.split("/")
        found |= {"/".join(parts[:n]) for n in range(place.count("/") + 2, len(parts))}
    return sorted(found, key=lambda name: (-name.count("/"), name))


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
