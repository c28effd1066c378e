"""Keys for an S3 store: where they come from, and how they are read again when they expire.

Sources, the first that is there: CKPT_S3_CREDENTIAL_COMMAND, the environment, a profile of the shared files
(its keys, or its `credential_process`). What those don't have, a pod's or an instance's role, is left to
obstore. Keys stand in no message and in no `repr`.
"""

from __future__ import annotations

import configparser
import datetime as dt
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt.errors import StorageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_COMMAND_TIMEOUT_S = 60.0
_MARGIN = dt.timedelta(minutes=5)
_READ_AGAIN_S = 10.0
_PAST = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Keys:
    """One set of credentials; `expires_at` is None where that isn't known."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires_at: dt.datetime | None = None


class KeySource(Protocol):
    """Where keys can be read as often as needed. Equal sources give equal keys."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    def read(self) -> Keys:
        """The keys as they are now. Raises StorageError."""


@dataclass(frozen=True)
class Environment:
    """AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN."""

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

    def read(self) -> Keys:
        """The keys as they are now. Raises StorageError."""
        key, secret, token = (os.environ.get(name) for name in KEY_VARIABLES)
        if not key or not secret:
            raise StorageError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY have to be set together")
        return Keys(key, secret, token or None)


@dataclass(frozen=True)
class Command:
    """A command that prints keys as JSON, in the form that AWS tools call process credentials."""

    line: str = field(repr=False)
    variable: str

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"the command in {self.variable}"

    def read(self) -> Keys:
        """Run it, without a shell. Raises StorageError; what it prints is never shown."""
        try:
            done = subprocess.run(
                shlex.split(self.line),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StorageError(f"{self.name} ran longer than {_COMMAND_TIMEOUT_S:.0f} s") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its quotes don't match"
            raise StorageError(f"{self.name} can't be run: {reason}") from None
        if done.returncode != 0:
            raise StorageError(
                f"{self.name} ended with exit code {done.returncode}: run it by hand to see why"
            )
        return self._parse(done.stdout)

    def _parse(self, output: bytes) -> Keys:
        try:
            data = json.loads(output)
            key, secret = data["AccessKeyId"], data["SecretAccessKey"]
            token, until = data.get("SessionToken"), data.get("Expiration")
            good = all(isinstance(item, str) and item for item in (key, secret))
            expires = dt.datetime.fromisoformat(until) if until else None
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise StorageError(
                f"{self.name} has to print JSON with Version, AccessKeyId and SecretAccessKey, and with "
                f"SessionToken and Expiration where they expire"
            )
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=dt.UTC)
        return Keys(key, secret, token or None, expires)


@dataclass(frozen=True)
class Profile:
    """A profile of the shared credentials and config files."""

    profile: str
    files: tuple[Path, Path]

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"profile {self.profile} of {self.files[0]}"

    def read(self) -> Keys:
        """The keys as they are now. Raises StorageError."""
        found = self.settings()
        command = found.get("credential_process")
        key, secret = found.get("aws_access_key_id"), found.get("aws_secret_access_key")
        if key and secret:
            return Keys(key, secret, found.get("aws_session_token") or None)
        if command:
            return Command(command, f"credential_process of {self.name}").read()
        raise StorageError(
            f"{self.name} holds no keys: it needs aws_access_key_id and aws_secret_access_key, or a "
            f"credential_process"
        )

    def settings(self) -> Mapping[str, str]:
        """All that the two files say of the profile; the credentials file wins."""
        credentials, config = self.files
        named = self.profile if self.profile == "default" else f"profile {self.profile}"
        return {**_section(config, named), **_section(credentials, self.profile)}


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, configparser.Error) as error:
        # The parser's own message repeats the lines that it can't read.
        raise StorageError(f"{path} can't be read ({type(error).__name__})") from None
    return dict(parser[name]) if parser.has_section(name) else {}


def source_of(environment: Mapping[str, str] | None = None) -> KeySource | None:
    """Where keys come from, by the environment; None if there are none that we can read ourselves."""
    env = os.environ if environment is None else environment
    command = env.get("CKPT_S3_CREDENTIAL_COMMAND")
    if command:
        return Command(command, "CKPT_S3_CREDENTIAL_COMMAND")
    if env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_SECRET_ACCESS_KEY"):
        return Environment()
    files = (
        Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
        Path(env.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
    )
    profile = Profile(env.get("AWS_PROFILE") or "default", files)
    if env.get("AWS_PROFILE") or {"aws_access_key_id", "credential_process"} & set(profile.settings()):
        return profile
    return None


class Provider:
    """The keys in use, as obstore asks for them before every request.

    They are read again when they are about to expire, and when `refresh` is called because the store refused
    them.
    """

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._read_at = 0.0
        self.generation = 0

    def __repr__(self) -> str:
        return f"Provider({self.name})"

    @property
    def name(self) -> str:
        """Where the keys come from, for messages."""
        return self._source.name

    @property
    def ended(self) -> bool:
        """Whether the keys last read are past their end."""
        end = self._keys.expires_at if self._keys else None
        return end is not None and end <= dt.datetime.now(dt.UTC)

    def keys(self) -> Keys:
        """The keys to use now. Raises StorageError if there are none."""
        with self._lock:
            if self._keys is None:
                self._take(self._source.read())
            elif self._ending(self._keys) and time.monotonic() - self._read_at > _READ_AGAIN_S:
                self._read_again()
            assert self._keys is not None
            return self._keys

    def refresh(self, generation: int) -> bool:
        """Read the keys again, unless somebody has since `generation`; whether they are others now."""
        with self._lock:
            if generation == self.generation:
                self._read_again()
            return generation != self.generation

    def __call__(self) -> S3Credential:
        keys = self.keys()
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token,
            # Long past, so that obstore keeps none of this and asks again for every request.
            "expires_at": _PAST,
        }

    def _ending(self, keys: Keys) -> bool:
        return keys.expires_at is not None and dt.datetime.now(dt.UTC) + _MARGIN >= keys.expires_at

    def _read_again(self) -> None:
        self._read_at = time.monotonic()
        try:
            self._take(self._source.read())
        except StorageError:
            # The old ones may still do; if not, the store says so.
            return

    def _take(self, keys: Keys) -> None:
        self._read_at = time.monotonic()
        if keys != self._keys:
            self._keys = keys
            self.generation += 1
