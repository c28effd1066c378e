"""Canonical JSON documents that carry their own digest and, with a key, a signature."""

import hmac
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ckpt.digest import DEFAULT, chunk_digest, is_digest
from ckpt.errors import Corrupt, StateError

KEY_VARIABLE = "CKPT_SIGNING_KEY"
# '~' sorts after every letter, so the seal is the last key of the canonical form and can be cut off as text.
_SEAL = re.compile(rb',"~seal":\{"digest":"([a-z0-9-]+):([0-9a-f]+)"(?:,"hmac":"([0-9a-f]{64})")?\}\}\Z')
_SEAL_LENGTH = 300


def signing_key() -> bytes | None:
    """The key that signs and checks manifests, from `CKPT_SIGNING_KEY`.

    Raises StateError if that is set but empty.
    """
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return None
    if not text.strip():
        raise StateError(
            f"{KEY_VARIABLE} is set but empty: give it the key, or unset it to work without signatures"
        )
    return text.encode()


def canonical(tree: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only: equal trees give equal bytes. ValueError for NaN."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(body: Mapping[str, Any], kind: str = DEFAULT, key: bytes | None = None) -> bytes:
    """The document `body` (at least one key, all before `~`) with its digest and, given a key, signature."""
    content = canonical(body)
    marks = {"digest": f"{kind}:{chunk_digest(kind, content)}"}
    if key is not None:
        marks["hmac"] = hmac.digest(key, content, "sha256").hex()
    return content[:-1] + b',"~seal":' + canonical(marks) + b"}"


def unseal(data: bytes, what: str, key: bytes | None = None) -> dict[str, Any]:
    """The document in sealed bytes. Raises Corrupt, naming `what`, if damaged or not signed with `key`."""
    found = _SEAL.search(data, max(0, len(data) - _SEAL_LENGTH))
    if found is None:
        raise Corrupt(f"{what} is torn or no such document: it does not end in a seal")
    content = data[: found.start()] + b"}"
    kind, digest, signature = found[1].decode(), found[2].decode(), found[3]
    if not is_digest(kind, digest) or chunk_digest(kind, content) != digest:
        raise Corrupt(f"{what} is damaged: its content does not match its own digest")
    if key is not None:
        if signature is None:
            raise Corrupt(f"{what} is not signed, and {KEY_VARIABLE} asks for signatures")
        if not hmac.compare_digest(hmac.digest(key, content, "sha256").hex().encode(), signature):
            raise Corrupt(
                f"{what} is signed with another key than {KEY_VARIABLE}, or was changed after signing"
            )
    return parse_object(content, what)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises Corrupt, naming `what`, for anything else."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what} is not readable JSON: {error}") from error
    if not isinstance(tree, dict):
        raise Corrupt(f"{what} is not a JSON object")
    return tree
