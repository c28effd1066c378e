"""Errors of the operating system, as the storage errors that say what failed and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import StorageError


@contextmanager
def reporting(verb: str, path: Path) -> Iterator[None]:
    """Raise each OSError inside as a StorageError that says what could not be done to `path`.

    With the verb `read` a FileNotFoundError stays what it is.
    """
    try:
        yield
    except FileNotFoundError as error:
        if verb == "read":
            raise
        raise StorageError(f"can't {verb} {path}: its folder is gone ({error.strerror})") from error
    except OSError as error:
        raise StorageError(f"can't {verb} {path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    advice = {
        errno.ENOSPC: "free space there, or keep fewer checkpoints",
        errno.EDQUOT: "the quota is used up: free space there, or have it raised",
        errno.EACCES: "check the owner and permissions of the folder",
        errno.EPERM: "check the owner and permissions of the folder",
        errno.EROFS: "it is mounted read-only",
        errno.ENOTDIR: "a part of this path is a file where a folder is needed",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ESTALE: "the NFS server no longer knows the folder: mount it again",
        errno.EIO: "the storage reports a fault: look at its log and at dmesg",
    }.get(error.errno or 0)
    return f"{text} ({advice})" if advice else text
