"""How to talk to an S3 store, read from the environment, so that all processes of a run agree."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import StorageError

_MIB = 1 << 20
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class S3Options:
    """`endpoint` is None for AWS itself; `ca_bundle` names a PEM file; sizes are bytes, times seconds.

    `checksums` asks for a checksum header on uploads, which not every store takes.
    """

    endpoint: str | None = None
    region: str = DEFAULT_REGION
    virtual_hosted: bool = False
    ca_bundle: Path | None = None
    checksums: bool = False
    part_bytes: int = 16 * _MIB
    parts_in_flight: int = 8
    deadline_s: float = 120.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> S3Options:
        """As the AWS_... and CKPT_S3_... variables say. Raises StorageError, naming the one that is wrong."""
        env = os.environ if environment is None else environment
        bundle = env.get("AWS_CA_BUNDLE") or None
        if bundle is not None and not Path(bundle).is_file():
            raise StorageError(f"AWS_CA_BUNDLE is {bundle!r}, which is no file: give the CA's PEM file")
        sums = _one_of(env, "AWS_REQUEST_CHECKSUM_CALCULATION", ("when_required", "when_supported"))
        return cls(
            endpoint=_endpoint(env),
            region=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or DEFAULT_REGION,
            virtual_hosted=_one_of(env, "CKPT_S3_ADDRESSING", ("path", "virtual")) == "virtual",
            ca_bundle=Path(bundle) if bundle else None,
            checksums=sums == "when_supported",
            part_bytes=int(_number(env, "CKPT_S3_PART_MIB", 16, 5, 5120) * _MIB),
            parts_in_flight=int(_number(env, "CKPT_S3_PARTS_IN_FLIGHT", 8, 1, 256)),
            deadline_s=_number(env, "CKPT_S3_DEADLINE_S", 120, 0.1, 86400),
        )

    @property
    def where(self) -> str:
        """The endpoint, for messages."""
        return self.endpoint or f"AWS (region {self.region})"


def _endpoint(env: Mapping[str, str]) -> str | None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        text = (env.get(name) or "").strip()
        if not text:
            continue
        if "@" in text:
            raise StorageError(f"{name} holds an '@': keys don't belong into an endpoint's address")
        if not re.fullmatch(r"https?://[^/\s?#]+/?", text):
            meant = re.sub(r"^([a-z]+:)?/*", "", text, flags=re.IGNORECASE).partition("/")[0]
            raise StorageError(
                f"{name} is {text!r}, which is no endpoint: give scheme, host and port only, as in "
                f"https://{meant or 'host'}"
            )
        return text.rstrip("/")
    return None


def _one_of(env: Mapping[str, str], name: str, choices: tuple[str, str]) -> str:
    text = (env.get(name) or choices[0]).strip().lower()
    if text not in choices:
        raise StorageError(f"{name} is {text!r}; it takes {' or '.join(choices)}")
    return text


def _number(env: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise StorageError(f"{name} is {text!r}; it takes a number from {low:g} to {high:g}")
    return number
