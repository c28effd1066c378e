"""Addresses of runs and of the folders that hold runs: what they may look like, and their one canonical form.

Text only: nothing here touches storage, and no message repeats what could be a key.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from ckpt.errors import StorageError

MAX_PREFIX = 800
"""Bytes that an object store's prefix may have: keys end at 1,024, and a run's own names need the rest."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,})")
_LIKE_S3 = re.compile(r"\s*s3[an]?\s*([:;][/\\]*|//+)", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAME_AS = {"gcs": "gs", "az": "abfs", "s3a": "s3", "s3n": "s3"}
_NO_PLACE = frozenset({"http", "https", "ftp", "data", "zip", "tar", "reference", "git", "github", "local"})
_CHOICES = "a folder (/p, p, ~/p or file:///p), s3://bucket/prefix, or another object store's address"


@dataclass(frozen=True)
class Folder:
    """A folder at an absolute path."""

    path: Path


@dataclass(frozen=True)
class Bucket:
    """A place in an S3 bucket; `prefix` has no slash at its ends, and is empty for the whole bucket."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        """The canonical address."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True)
class Remote:
    """A place that fsspec knows by its protocol."""

    protocol: str
    path: str

    @property
    def uri(self) -> str:
        """The canonical address."""
        return f"{self.protocol}://{self.path}"


def parse(uri: str | Path) -> Folder | Bucket | Remote:
    """What an address means; a plain path is taken as it stands, with whatever characters it holds.

    Raises StorageError, naming what was probably meant, for what looks mistyped or is of no known kind.
    """
    text = str(uri)
    if not text.strip():
        raise StorageError("the address of the run is empty: give a folder such as runs/my-run")
    if "\0" in text:
        raise StorageError(f"the address {text!r} holds a NUL character, which no path can")
    if _LIKE_S3.match(text):
        return _bucket(uri)
    scheme = _SCHEME.match(text) if isinstance(uri, str) else None
    if scheme and scheme[1].lower() != "file":
        return _remote(text, scheme[1], scheme[2])
    if isinstance(uri, str) and "://" in text and not scheme and text[0] not in "/.~":
        raise StorageError(
            f"{text!r} is no address: give {_CHOICES}. If this is a folder whose name holds '://', write "
            f"./{text}"
        )
    return Folder(folder_of(uri))


def folder_of(uri: str | Path) -> Path:
    """The absolute folder that an address means. Raises StorageError if it means no folder.

    Takes `/p`, `p`, `~/p` and `file:///p` (percent-encoded as usual in URIs).
    """
    text = str(uri)
    if isinstance(uri, str) and re.match(r"file:", text, re.IGNORECASE):
        return _absolute(_file_path(text))
    path = Path(text)
    if text.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError as error:
            raise StorageError(
                f"{text!r}: there is no such user here; if the folder's name really starts with '~', "
                f"write ./{text}"
            ) from error
    return _absolute(path)


def name_of(uri: str) -> str:
    """The last part of a canonical address."""
    return uri.rpartition("/")[2]


def parent_of(uri: str) -> str | None:
    """The canonical address that a canonical one lies in; None for a whole bucket or the root folder."""
    scheme, separator, rest = uri.rpartition("://") if "://" in uri else ("", "", uri)
    head, slash, _ = rest.rpartition("/")
    if not slash or (separator and not head):
        return None
    if not head:
        return "/" if rest != "/" else None
    return f"{scheme}{separator}{head}"


def _bucket(uri: str | Path) -> Bucket:
    text = str(uri)
    found = re.fullmatch(r"s3://([^/]*)(.*)", text, re.DOTALL)
    if found is None or not isinstance(uri, str):
        _refuse_like_s3(text)
    bucket, rest = found[1], found[2]
    if "@" in bucket:
        raise StorageError(
            "an s3:// address holds an '@' before its path: keys don't belong into addresses; give "
            "s3://bucket/prefix, and the keys in the environment or a credentials file"
        )
    if not bucket:
        meant = rest.strip("/")
        raise StorageError(
            f"{text!r} names no bucket" + (f": was s3://{meant} meant?" if meant else ": give s3://bucket")
        )
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        lower = bucket.lower()
        hint = f": was s3://{lower}{rest} meant?" if _BUCKET.fullmatch(lower) and lower != bucket else ""
        raise StorageError(
            f"{bucket!r} in {text!r} can't be a bucket: a bucket's name has 3 to 63 of a-z, 0-9, '-' and "
            f"'.'{hint}"
        )
    prefix = "/".join(part for part in rest.split("/") if part)
    _check_prefix(prefix, text)
    return Bucket(bucket, prefix)


def _refuse_like_s3(text: str) -> NoReturn:
    if "@" in text:
        raise StorageError("an address that looks like s3:// is mistyped, and holds an '@': give s3://bucket")
    start = _LIKE_S3.match(text)
    meant = "/".join(part for part in text[start.end() if start else 0 :].split("/") if part)
    raise StorageError(
        f"{text!r} looks like an address in an object store, but is none: was s3://{meant or 'bucket'} "
        f"meant? If this is a folder, write ./{text.strip()}"
    )


def _check_prefix(prefix: str, text: str) -> None:
    if any(part in (".", "..") for part in prefix.split("/")):
        raise StorageError(f"{text!r}: an object store knows no '.' or '..'; write the address without them")
    if _CONTROL.search(prefix):
        raise StorageError(f"{text!r} holds control characters")
    if prefix != prefix.strip():
        raise StorageError(f"{text!r} starts or ends with a space: was {text.strip()!r} meant?")
    if len(prefix.encode()) > MAX_PREFIX:
        raise StorageError(
            f"the prefix of {text[:80]!r}... has {len(prefix.encode())} bytes; {MAX_PREFIX} are taken"
        )


def _remote(text: str, scheme: str, slashes: str) -> Remote:
    protocol = scheme.lower()
    rest = text[len(scheme) + 1 :].lstrip("/")
    if "@" in rest.partition("/")[0] and protocol != "abfss":
        raise StorageError(f"an address {scheme}:// holds an '@' before its path: keys don't belong there")
    if protocol in ("http", "https"):
        raise StorageError(
            f"{text!r}: storage of the kind '{scheme}:' is not supported; for an object store give "
            f"s3://bucket/prefix, and its endpoint in AWS_ENDPOINT_URL"
        )
    known = _known_protocols()
    wanted = _SAME_AS.get(protocol, protocol)
    if wanted not in known or protocol in _NO_PLACE or "::" in text.partition("://")[0]:
        near = difflib.get_close_matches(protocol, known, n=1)
        hint = f" (was {near[0]}://{rest} meant?)" if near else ""
        raise StorageError(
            f"{text!r}: storage of the kind '{scheme}:' is not supported{hint}; give {_CHOICES}. If this is "
            f"a folder whose name holds a colon, write ./{text}"
        )
    if wanted != scheme or slashes not in ("//", "///") or (slashes == "///" and protocol != "memory"):
        raise StorageError(f"{text!r} is mistyped: was {wanted}://{rest} meant?")
    path = "/".join(part for part in rest.split("/") if part)
    if not path and protocol != "memory":
        raise StorageError(f"{text!r} names no bucket")
    _check_prefix(path, text)
    return Remote(protocol, path)


def _known_protocols() -> frozenset[str]:
    from fsspec.registry import known_implementations

    caches = {name for name in known_implementations if "cache" in name or "::" in name}
    return frozenset({"s3", *known_implementations} - caches - _NO_PLACE - {"file", "s3a", "gcs", "az"})


def _file_path(text: str) -> Path:
    rest = text[len("file:") :]
    if rest.lower().startswith("//localhost/"):
        rest = rest[len("//localhost") :]
    elif re.match(r"///(?!/)", rest):
        rest = rest[len("//") :]
    else:
        raise StorageError(f"{text!r}: a file address has three slashes, as in file:///data/runs/my-run")
    decoded = unquote(rest)
    if "\0" in decoded:
        raise StorageError(f"the address {text!r} holds a NUL character, which no path can")
    return Path(decoded)


def _absolute(path: Path) -> Path:
    # Not resolve(): a run keeps the address it was given, also where its root is a symbolic link.
    parts: list[str] = []
    for part in path.absolute().parts:
        if part == "..":
            return path.resolve()
        parts.append(part)
    return Path(*parts)
