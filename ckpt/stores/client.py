"""One S3 bucket as this process talks to it: connections, keys, retries, and errors made plain."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from ckpt.errors import StorageError
from ckpt.exclusive import TEMPORARY
from ckpt.stores import failures
from ckpt.stores.credentials import KEY_VARIABLES, KeySource, Provider, source_of
from ckpt.stores.failures import Failure, failure_of
from ckpt.stores.options import S3Options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_FIRST_CONTACT_S = 5.0
_FIRST_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 60.0
_MANY = 10_000
_CONNECT_TIMEOUT_S = 5.0
_ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_clients: dict[tuple[object, ...], Client] = {}
_clients_lock = threading.Lock()
_parents: list[dict[tuple[object, ...], Client]] = []
_used = False
_forked = False


def _note_fork() -> None:
    global _forked, _clients, _clients_lock
    _forked = _forked or _used
    # Kept for ever: to let go of a client takes locks, which a thread of the parent may have held.
    _parents.append(_clients)
    _clients = {}
    _clients_lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_note_fork)


def client_of(bucket: str, options: S3Options) -> Client:
    """The client of a bucket; stores with equal options and keys share one. Raises StorageError."""
    source = source_of()
    keys = tuple(os.environ.get(name) for name in KEY_VARIABLES)
    identity = (bucket, options, source, keys)
    with _clients_lock:
        if identity not in _clients:
            _clients[identity] = Client(bucket, options, source)
        return _clients[identity]


class Client:
    """Connections to one bucket.

    `raw` tries again by itself, for transfers of many requests; `once` makes each request once, for work
    whose every attempt has to be known. All are to be used inside `call` only.
    """

    def __init__(self, bucket: str, options: S3Options, source: KeySource | None) -> None:
        self.bucket = bucket
        self.options = options
        self.provider = None if source is None else Provider(source)
        self._worked = False
        self._creates: bool | None = None
        self._creates_lock = threading.Lock()
        if self.provider is None and options.endpoint and not _has_role():
            raise StorageError(
                f"there are no credentials for bucket {bucket} at {options.where}: set AWS_ACCESS_KEY_ID and "
                f"AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or CKPT_S3_CREDENTIAL_COMMAND"
            )
        self._first = self._connect(0, _FIRST_TIMEOUT_S)
        self._once = self._connect(0, _REQUEST_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"Client({self.bucket!r} at {self.options.where!r})"

    @cached_property
    def raw(self) -> S3Store:
        """Obstore's store with its own retries, up to the deadline."""
        return self._connect(_MANY, _REQUEST_TIMEOUT_S)

    @cached_property
    def bulk(self) -> S3Store:
        """As `once`, but many keys are deleted by one request, which not every store knows."""
        return self._connect(0, _REQUEST_TIMEOUT_S, bulk=True)

    @property
    def once(self) -> S3Store:
        """Obstore's store without retries; impatient until the first request has succeeded."""
        return self._once if self._worked else self._first

    def call(self, what: str, work: Callable[[], _T], deadline_s: float | None = None) -> _T:
        """Do `work`, again while it fails for a passing reason, for `deadline_s` seconds (the options').

        `what` says in messages what could not be done, such as "can't read s3://b/k". What obstore raises
        becomes StorageError with an OSError as its cause; only FileNotFoundError and AlreadyExistsError stay,
        where they mean what they say. `work` is to make requests through `raw` or `once`, and may be done
        more than once.
        """
        self._begin()
        started = time.monotonic()
        limit = self.options.deadline_s if deadline_s is None else deadline_s
        pause, refreshed = _FIRST_PAUSE_S, False
        while True:
            generation = self._generation(what)
            try:
                done = work()
            except (BaseError, FileNotFoundError) as error:
                failure = failure_of(error)
                if _means_what_it_says(error, failure):
                    self._worked = True
                    raise _plain(error, what) from None
                if failure.refused and self.provider is not None and self.provider.ended:
                    failure = failure._replace(code="ExpiredToken")
            else:
                self._worked = True
                return done
            renewed = failure.about_keys and self._renew(generation)
            again = failure.passes or failure.expired or (renewed and not refreshed)
            refreshed = refreshed or renewed
            waited = time.monotonic() - started
            most = limit if self._worked or _serves(failure) else min(limit, _FIRST_CONTACT_S)
            if not again or waited >= most:
                raise self._error(what, failure, waited)
            time.sleep(min(random.uniform(0, pause), max(0.0, most - waited)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def creates_exclusively(self, key: str) -> bool:
        """Whether the store honours create-only PUTs; found out once, with an object beside `key`."""
        with self._creates_lock:
            if self._creates is None:
                self._creates = self._probe(key)
            return self._creates

    def _probe(self, key: str) -> bool:
        folder = key.rpartition("/")[0]
        probe = f"{folder}/{TEMPORARY}probe-{os.urandom(8).hex()}".lstrip("/")
        what = f"can't try create-only writes in {self.bucket}"

        def create() -> bool:
            obstore.put(self.once, probe, b"probe", mode="create", use_multipart=False)
            return True

        try:
            try:
                self.call(what, create)
            except AlreadyExistsError:
                pass  # made by a try whose answer was lost
            try:
                self.call(what, create)
            except AlreadyExistsError:
                return True
            return False
        except StorageError as error:
            if isinstance(error.__cause__, RequestError) and error.__cause__.failure.status in (
                400,
                405,
                501,
            ):
                return False
            raise
        finally:
            with suppress(StorageError, FileNotFoundError):
                self.call(what, lambda: obstore.delete(self.once, probe))

    def _connect(self, retries: int, timeout_s: float, bulk: bool = False) -> S3Store:
        options = self.options
        client: ClientConfig = {
            "allow_http": bool(options.endpoint and options.endpoint.startswith("http://")),
            "timeout": timedelta(seconds=min(timeout_s, options.deadline_s)),
            "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, options.deadline_s)),
        }
        if options.ca_bundle is not None:
            try:
                client["root_certificate"] = options.ca_bundle.read_bytes()
            except OSError as error:
                raise StorageError(
                    f"AWS_CA_BUNDLE {options.ca_bundle} can't be read: {error.strerror}"
                ) from error
        config: S3Config = {
            "region": options.region,
            "virtual_hosted_style_request": options.virtual_hosted,
            "disable_bulk_delete": not bulk,
        }
        if options.endpoint:
            config["endpoint"] = self._endpoint(options.endpoint)
        if options.checksums:
            config["checksum_algorithm"] = "SHA256"
        try:
            return S3Store(
                self.bucket,
                config=config,
                client_options=client,
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=options.deadline_s),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                        "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                        "base": 2,
                    },
                },
                credential_provider=self.provider,
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StorageError(f"no client for bucket {self.bucket} at {options.where}: {reason}") from None

    def _endpoint(self, endpoint: str) -> str:
        # obstore expects the bucket in the endpoint where requests go to a host named after it.
        if not self.options.virtual_hosted:
            return endpoint
        scheme, _, host = endpoint.partition("://")
        return f"{scheme}://{self.bucket}.{host}"

    def _begin(self) -> None:
        global _used
        if _forked:
            raise StorageError(
                "this process was forked from one that had used object storage, where its connections hang: "
                "start it by spawn, or fork before the first use"
            )
        _used = True

    def _generation(self, what: str) -> int:
        """Look at the keys before each request, where a problem with them can be told as it is."""
        if self.provider is None:
            return 0
        try:
            self.provider.keys()
        except StorageError as error:
            raise StorageError(f"{what}: {error}") from None
        return self.provider.generation

    def _renew(self, generation: int) -> bool:
        return self.provider is not None and self.provider.refresh(generation)

    def _error(self, what: str, failure: Failure, waited: float) -> StorageError:
        keys = self.provider.name if self.provider else "this machine's or pod's role"
        text = failures.explain(failure, self.bucket, self.options.where, keys)
        tried = f", tried for {waited:.0f} s" if failure.passes and waited >= 1 else ""
        error = StorageError(f"{what}: {text}{tried}")
        error.__cause__ = RequestError(failure, text)
        return error


class RequestError(OSError):
    """The cause of a StorageError, with the nearest code of the operating system."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(failure.errno, text)
        self.failure = failure


def _serves(failure: Failure) -> bool:
    """Whether a working S3 server is at the other end, which only has to be waited for."""
    return failure.kind == failures.STATUS and not failure.expired


def _has_role() -> bool:
    anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    return anonymous or any(os.environ.get(name) for name in _ROLE_VARIABLES)


def _means_what_it_says(error: BaseException, failure: Failure) -> bool:
    if isinstance(error, AlreadyExistsError):
        return failure.status != 409
    return isinstance(error, FileNotFoundError) and failure.code != "NoSuchBucket"


def _plain(error: BaseException, what: str) -> Exception:
    """The same error without the server's answer in it."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"{what}: there is no such object")
    return AlreadyExistsError(what)
