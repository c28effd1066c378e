"""Uploads that were begun and never finished: a writer that is killed leaves them, and nothing lists them as
objects, but the store keeps what was sent.

obstore has no request that finds or ends another process's uploads, so the two that do are made here.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from ckpt.errors import StorageError
from ckpt.stores.credentials import Keys
from ckpt.stores.options import S3Options

__all__ = ["Uploads"]

_TIMEOUT_S = 30.0
_MAX_ANSWER = 16 << 20
_EMPTY = hashlib.sha256(b"").hexdigest()


class Upload(NamedTuple):
    """One unfinished upload; `key` is the whole one in its bucket."""

    key: str
    id: str


class Uploads:
    """The unfinished uploads of one bucket. Methods raise StorageError, also where a store lacks them."""

    def __init__(self, bucket: str, options: S3Options, keys: Callable[[], Keys]) -> None:
        self._bucket = bucket
        self._options = options
        self._keys = keys
        tls = ssl.create_default_context()
        if options.ca_bundle is not None:
            tls.load_verify_locations(options.ca_bundle)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls), _NoRedirect)

    def abort(self, prefix: str, wanted: Callable[[str], bool]) -> int:
        """End those below `prefix` whose key is `wanted`, and give up what was sent; how many there were."""
        found = [upload for upload in self._list(prefix) if wanted(upload.key)]
        for upload in found:
            self._request("DELETE", upload.key, {"uploadId": upload.id})
        return len(found)

    def _list(self, prefix: str) -> Iterator[Upload]:
        after: dict[str, str] = {}
        while True:
            answer = self._request("GET", "", {"uploads": "", "prefix": prefix, **after})
            try:
                root = ElementTree.fromstring(answer)
            except ElementTree.ParseError as error:
                raise StorageError(f"{self._place} lists unfinished uploads in no readable way") from error
            for node in root:
                if _name(node) == "Upload":
                    fields = _fields(node)
                    if fields.get("Key") and fields.get("UploadId"):
                        yield Upload(fields["Key"], fields["UploadId"])
            page = _fields(root)
            if page.get("IsTruncated") != "true" or not page.get("NextKeyMarker"):
                return
            after = {"key-marker": page["NextKeyMarker"]}
            if page.get("NextUploadIdMarker"):
                after["upload-id-marker"] = page["NextUploadIdMarker"]

    @property
    def _place(self) -> str:
        return f"bucket {self._bucket} at {self._options.where}"

    def _request(self, method: str, key: str, query: Mapping[str, str]) -> bytes:
        options = self._options
        base = urlsplit(options.endpoint or f"https://s3.{options.region}.amazonaws.com")
        host, path = (
            (f"{self._bucket}.{base.netloc}", f"/{key}")
            if options.virtual_hosted
            else (base.netloc, f"/{self._bucket}/{key}".rstrip("/"))
        )
        path = quote(path, safe="/-_.~")
        text = "&".join(f"{_escaped(name)}={_escaped(value)}" for name, value in sorted(query.items()))
        signed = _signed(method, host, path, text, options.region, self._keys(), dt.datetime.now(dt.UTC))
        request = urllib.request.Request(
            f"{base.scheme}://{host}{path}?{text}", method=method, headers=signed
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            if method == "DELETE" and error.code == 404:
                return b""  # somebody else was faster
            raise StorageError(f"{self._place} answers HTTP {error.code} about unfinished uploads") from None
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(f"{self._place} can't be asked about unfinished uploads: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What was signed for one host is shown to no other."""

    def redirect_request(self, *_: object) -> None:
        return None


def _signed(
    method: str, host: str, path: str, query: str, region: str, keys: Keys, now: dt.datetime
) -> dict[str, str]:
    """The headers of a request without a body, signed as AWS's signature version 4 asks for."""
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    asked = "\n".join((method, path, query, lines, names, _EMPTY))
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(asked.encode()).hexdigest()
    secret = f"AWS4{keys.secret_access_key}".encode()
    for word in scope.split("/"):
        secret = hmac.digest(secret, word.encode(), "sha256")
    signature = hmac.digest(secret, "\n".join(("AWS4-HMAC-SHA256", stamp, scope, digest)).encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access_key_id}/{scope}, SignedHeaders={names}, "
        f"Signature={signature.hex()}"
    )
    return headers


def _escaped(text: str) -> str:
    return quote(text, safe="-_.~")


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _fields(node: ElementTree.Element) -> dict[str, str]:
    return {_name(child): child.text or "" for child in node}
