"""Digests of stored bytes: one per 16 MiB chunk, and one over those for the whole file."""

from collections.abc import Sequence
from typing import Protocol

from ckpt.errors import StateError

CHUNK = 16 << 20
"""Bytes that one chunk digest covers; the last chunk of a file may be shorter."""

HEX_LENGTHS = {"xxh3-128": 32, "blake3": 64}
"""The kinds, and how many hexadecimal digits each has."""

DEFAULT = "xxh3-128"


class Hasher(Protocol):
    """What `new_hasher` returns."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far, in lower-case hexadecimal."""


def new_hasher(kind: str) -> Hasher:
    """An empty hasher. `xxh3-128` finds corruption at memory speed, `blake3` finds tampering as well.

    Raises StateError for any other kind.
    """
    # Imported when used: the writer process should start fast, and most runs use one kind only.
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "blake3":
        from blake3 import blake3

        return blake3()
    raise StateError(f"there is no digest {kind!r}: choose one of {', '.join(HEX_LENGTHS)}")


def chunk_digest(kind: str, buffer: bytes | bytearray | memoryview) -> str:
    """Digest of one buffer, in hexadecimal."""
    hasher = new_hasher(kind)
    hasher.update(buffer)
    return hasher.hexdigest()


def file_digest(kind: str, chunk_digests: Sequence[str]) -> str:
    """Digest of a file: that of its chunks' raw digests, one after the other."""
    return chunk_digest(kind, bytes.fromhex("".join(chunk_digests)))


def is_digest(kind: str, text: object) -> bool:
    """Whether `text` is written as a digest of this kind is."""
    return isinstance(text, str) and len(text) == HEX_LENGTHS.get(kind) and not text.strip("0123456789abcdef")
