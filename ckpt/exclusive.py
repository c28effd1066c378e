"""Creating a file that appears whole, durably and only if nobody else has created it before.

On POSIX a hard link is the one operation that is atomic, refuses an existing name and works over NFS. File
systems without hard links get `renameat2(RENAME_NOREPLACE)`, and those without that get O_EXCL, where a
creator that dies leaves a torn file: whoever reads what was created this way has to recognise a torn one and
take it as absent.
"""

import ctypes
import errno
import os
import secrets
from pathlib import Path

from ckpt.faults import point

TEMPORARY = ".tmp-"
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_LINKS = {
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EMLINK,
    errno.EXDEV,
}
_NO_RENAME = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def create(path: Path, data: bytes) -> bool:
    """Create `path` holding `data`, durable on return; False if it already exists. Raises OSError."""
    temporary = write_temporary(path, data, durable=True)
    try:
        made = _publish(temporary, path)
        if made is None:
            made = _create_plainly(path, data)
    finally:
        temporary.unlink(missing_ok=True)
    if made:
        sync_folder(path.parent)
    return made


def write_temporary(path: Path, data: bytes, durable: bool) -> Path:
    """Write `data` to a new file beside `path`, synced if `durable`, and say where it is. Raises OSError."""
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _fill(fd, data, path, durable)
        finally:
            os.close(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    point("fsync_dir", folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(temporary: Path, path: Path) -> bool | None:
    """Give the temporary file its name; None if this file system can do so neither way."""
    point("link", path)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS the answer to a link that worked can be lost, and the client's second try then finds the
        # name taken by itself: only the link count tells that case from somebody else's file.
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return True
    try:
        _rename_no_replace(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        return None
    return True


def _rename_no_replace(source: Path, target: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "renameat2 is not in this C library")
    flags = ctypes.c_uint(_RENAME_NOREPLACE)
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _create_plainly(path: Path, data: bytes) -> bool:
    point("create_plainly", path)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        try:
            _fill(fd, data, path, durable=True)
        finally:
            os.close(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def _fill(fd: int, data: bytes, path: Path, durable: bool) -> None:
    point("write", path)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    if durable:
        point("fsync", path)
        os.fsync(fd)
