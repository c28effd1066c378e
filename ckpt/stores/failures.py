"""What obstore's errors mean: whether they pass by themselves, and what to tell people.

An error's own text repeats the server's answer, which may hold what was signed. So little more than its code
is taken from it, and no such error is chained to what is raised.
"""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>|\(code: ([A-Za-z0-9.]{1,60})\)")
_ROLE = re.compile(r"//169\.254\.|/latest/(api|meta-data)/|AssumeRoleWithWebIdentity")
_CERTIFICATE_ADVICE = {
    "CaUsedAsEndEntity": "is that of a CA itself (CA:TRUE), which is refused: let a CA sign another one",
    "Expired": "has expired: renew it, or set this machine's clock",
    "NotValidForName": "is for another host: give the name that it is for in AWS_ENDPOINT_URL",
}
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageFull"})
TIMEOUT, UNREACHABLE, UNTRUSTED, LOST, ANSWER, STATUS, KEYS, OTHER = (
    "timeout",
    "unreachable",
    "untrusted",
    "lost",
    "answer",
    "status",
    "keys",
    "other",
)


class Failure(NamedTuple):
    """One failed request: of which kind, and the server's HTTP status and code where it gave any.

    `detail` is free of what the server said.
    """

    kind: str
    status: int | None = None
    code: str | None = None
    detail: str = ""

    @property
    def passes(self) -> bool:
        """Whether the same request may well succeed later."""
        if self.kind == STATUS:
            return self.status in _PASSING_STATUS or self.status == 409 or self.code in _PASSING_CODES
        return self.kind in (TIMEOUT, UNREACHABLE, LOST, ANSWER)

    @property
    def expired(self) -> bool:
        """Whether newer credentials are all that is missing."""
        return self.code in _EXPIRED

    @property
    def refused(self) -> bool:
        """Whether the credentials were not accepted, for whatever reason."""
        return self.expired or self.code == "InvalidToken" or self.status in (401, 403)

    @property
    def about_keys(self) -> bool:
        """Whether other credentials may help. The answer to a HEAD has no body that says so."""
        return self.refused or (self.status == 400 and self.code is None)

    @property
    def errno(self) -> int:
        """The code of the operating system that comes nearest."""
        if self.kind == STATUS:
            if self.code in _FULL or self.status == 507:
                return errno.ENOSPC
            if self.refused:
                return errno.EACCES
            if self.status == 404:
                return errno.ENOENT
            return errno.EAGAIN if self.passes else errno.EIO
        return {
            TIMEOUT: errno.ETIMEDOUT,
            UNREACHABLE: errno.ECONNREFUSED,
            LOST: errno.ECONNRESET,
            ANSWER: errno.EAGAIN,
            KEYS: errno.EACCES,
        }.get(self.kind, errno.EIO)


def failure_of(error: BaseException) -> Failure:
    """What an error that obstore raised means."""
    text = str(error)
    if "credential provider" in text or _ROLE.search(text):
        return Failure(KEYS)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status or code:
        return Failure(STATUS, int(status[1]) if status else None, (code[1] or code[2]) if code else None)
    if "InvalidCertificate" in text or "invalid peer certificate" in text:
        why = text.partition("InvalidCertificate")[2]
        return Failure(UNTRUSTED, detail=next((name for name in _CERTIFICATE_ADVICE if name in why), ""))
    if "TimedOut" in text or "kind: Timeout" in text or "timed out" in text:
        return Failure(TIMEOUT)
    if "kind: Connect" in text:
        return Failure(UNREACHABLE)
    if (
        "HTTP error" in text
        or "kind: Request" in text
        or "kind: Interrupted" in text
        or "IncompleteBody" in text
    ):
        return Failure(LOST)
    if (
        "ETag Header missing" in text
        or "Unable to extract metadata" in text
        or "invalid list response" in text
    ):
        return Failure(ANSWER)
    if "BareRedirect" in text or "incorrectly configured region" in text:
        return Failure(STATUS, 301, "PermanentRedirect")
    return Failure(OTHER, detail=text.partition("\n")[0].partition("<")[0][:200])


def explain(failure: Failure, bucket: str, where: str, keys: str) -> str:
    """What went wrong and what to do; `keys` says where the credentials come from."""
    code = failure.code or (f"HTTP {failure.status}" if failure.status else failure.kind)
    place = f"bucket {bucket} at {where}"
    if failure.code == "NoSuchBucket":
        return f"there is no bucket {bucket} at {where}: make it, or correct the address"
    if failure.expired:
        return (
            f"the credentials from {keys} have expired, says {where} ({code}), and no newer ones are there: "
            f"renew them where they come from"
        )
    if failure.code == "InvalidAccessKeyId":
        return f"{where} doesn't know the access key from {keys} ({code}): check the key, and the endpoint"
    if failure.code == "SignatureDoesNotMatch":
        return (
            f"{where} says that the secret key from {keys} doesn't belong to its access key ({code}): check "
            f"both, and AWS_REGION"
        )
    if failure.code == "RequestTimeTooSkewed":
        return f"this machine's clock and that of {where} differ too much ({code}): set the clock"
    if failure.refused:
        return (
            f"{where} refuses the credentials from {keys} in bucket {bucket} ({code}): check the keys, and "
            f"that their policy allows to list, read, write and delete there"
        )
    if failure.status in (301, 307, 308):
        return f"bucket {bucket} lies elsewhere than {where} ({code}): check AWS_REGION and the endpoint"
    if failure.kind == UNTRUSTED:
        reason = failure.detail.removesuffix("Context")
        advice = _CERTIFICATE_ADVICE.get(
            reason, "is signed by no CA known here: give its CA in AWS_CA_BUNDLE"
        )
        return f"the certificate of {where} {advice}"
    return {
        UNREACHABLE: f"{where} can't be reached: check AWS_ENDPOINT_URL, the network, and the server itself",
        TIMEOUT: f"{where} doesn't answer in time: check the network and the load of the server",
        LOST: f"the connection to {where} broke off",
        ANSWER: f"{where} gave an answer that makes no sense: check that an S3 server is at this endpoint",
        KEYS: f"no usable credentials come from {keys}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "AWS_PROFILE, or CKPT_S3_CREDENTIAL_COMMAND",
    }.get(failure.kind, f"{place} answered with an error ({failure.detail or code})")
