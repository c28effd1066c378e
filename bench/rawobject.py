"""Raw speed of an object store, in a process without torch that shares no interpreter lock with training.

    python -m bench.rawobject THREADS

does what it is told by lines of JSON ({"do": "write", "read" or "delete", "path": ADDRESS, "bytes": BYTES})
and answers each as `bench.rawio` does. An object is put in parts as large, and as many at once, as the
environment says for the checkpoint engine, and read by ranges of 16 MiB in as many threads, THREADS at least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import obstore

from bench.rawio import BLOCK, block_buffers, serve
from ckpt.errors import StorageError
from ckpt.stores import addresses
from ckpt.stores.client import Client, client_of
from ckpt.stores.multipart import part_size
from ckpt.stores.options import S3Options


class RawObject:
    """One object at an address, moved by obstore and nothing else. Raises StorageError."""

    def __init__(self, uri: str) -> None:
        place = addresses.parse(uri)
        if not isinstance(place, addresses.Bucket):
            raise StorageError(f"{uri} is no address in a bucket")
        self._uri, self._key = uri, place.prefix
        self._client: Client = client_of(place.bucket, S3Options.from_environment())

    def put(self, size: int, buffer: memoryview) -> float:
        """Put an object of `size` bytes, the buffer's over and over; the seconds."""
        options = self._client.options
        start = time.monotonic()
        self._client.call(
            f"can't write {self._uri}",
            lambda: obstore.put(
                self._client.raw,
                self._key,
                _blocks(size, buffer),
                use_multipart=size > options.part_bytes,
                chunk_size=part_size(size, options.part_bytes),
                max_concurrency=options.parts_in_flight,
            ),
        )
        return time.monotonic() - start

    def get(self, size: int, threads: int) -> float:
        """Get `size` bytes of the object; the seconds."""
        start = time.monotonic()
        with ThreadPoolExecutor(max(threads, self._client.options.parts_in_flight)) as pool:
            moved = sum(pool.map(lambda offset: self._range(offset, size), range(0, size, BLOCK)))
        if moved != size:
            raise StorageError(f"{self._uri}: {size} bytes were asked for, {moved} came")
        return time.monotonic() - start

    def delete(self) -> None:
        """Delete the object; one that isn't there is no error."""
        with suppress(FileNotFoundError):
            self._client.call(
                f"can't delete {self._uri}", lambda: obstore.delete(self._client.once, self._key)
            )

    def _range(self, start: int, size: int) -> int:
        length = min(BLOCK, size - start)
        return len(
            self._client.call(
                f"can't read {self._uri}",
                lambda: obstore.get_range(self._client.raw, self._key, start=start, length=length),
            )
        )


def _blocks(size: int, buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, size, BLOCK):
        yield buffer[: min(BLOCK, size - start)]


def _answer(asked: dict[str, Any], buffer: memoryview, threads: int) -> dict[str, Any]:
    seconds = 0.0
    try:
        object_ = RawObject(asked["path"])
        if asked["do"] == "write":
            seconds = object_.put(asked["bytes"], buffer)
        elif asked["do"] == "read":
            seconds = object_.get(asked["bytes"], threads)
        else:
            object_.delete()
    except (StorageError, OSError) as error:
        return {"error": str(error)}
    return {"seconds": seconds, "direct": False, "at": time.monotonic()}


if __name__ == "__main__":
    block = block_buffers(1)[0]
    serve(lambda asked: _answer(asked, block, int(sys.argv[1])))
