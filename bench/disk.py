"""One file or object of raw bytes, written and read by a helper process that is kept running."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.places import Place, Prefix
from bench.spec import READ_THREADS, WRITE_THREADS

_LEAVE_S = 10.0


@dataclass(frozen=True)
class Moved:
    """A transfer that is done. at: when, on the machine's monotonic clock."""

    seconds: float
    direct: bool
    at: float


class RawDisk:
    """Moves `size` bytes at a time to and from a file, one transfer after the other."""

    helper = "bench.rawio"

    def __init__(self, path: Place, size: int) -> None:
        """Start the helper and return once it is ready. Raises OSError if it does not start."""
        self._path, self._size = path, size
        self._helper = subprocess.Popen(
            [sys.executable, "-m", self.helper, str(max(READ_THREADS, WRITE_THREADS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._moved: Moved | None = None
        self._hear()

    def begin(self, way: str) -> None:
        """Begin to "write" the file anew or to "read" it."""
        if way == "write":
            self.remove()
        self._moved = None
        self._ask(way)

    def done(self) -> Moved | None:
        """The transfer that was begun last, None while it lasts. Raises OSError if it failed."""
        assert self._helper.stdout is not None
        if self._moved is None and select.select([self._helper.stdout], [], [], 0)[0]:
            self.wait()
        return self._moved

    def wait(self) -> Moved:
        """The transfer that was begun last, once it is done. Raises OSError if it failed."""
        if self._moved is None:
            found = self._hear()
            self._moved = Moved(found["seconds"], found["direct"], found["at"])
        return self._moved

    def remove(self) -> None:
        """Delete the file, if there is one."""
        Path(str(self._path)).unlink(missing_ok=True)

    def close(self) -> None:
        """End the helper and delete the file."""
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(_LEAVE_S)
        self.remove()

    def _ask(self, do: str) -> None:
        threads = WRITE_THREADS if do == "write" else READ_THREADS
        asked = {"do": do, "path": str(self._path), "bytes": self._size, "threads": threads}
        assert self._helper.stdin is not None
        self._helper.stdin.write(json.dumps(asked) + "\n")
        self._helper.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._helper.stdout is not None
        line = self._helper.stdout.readline()
        if not line:
            raise OSError(f"the process that writes raw bytes ended with code {self._helper.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise OSError(f"raw bytes could not be moved: {found['error']}")
        return found


class RawBucket(RawDisk):
    """The same with an object; `direct` is never true."""

    helper = "bench.rawobject"
    _there = False

    def begin(self, way: str) -> None:
        """Begin to "write" the object anew or to "read" it."""
        super().begin(way)
        self._there = True

    def remove(self) -> None:
        """Delete the object, if there is one."""
        if self._there:
            self._there = False
            self._ask("delete")
            self._hear()

    def close(self) -> None:
        """Delete the object and end the helper."""
        self.remove()
        super().close()


def raw(place: Place, size: int) -> RawDisk:
    """What moves `size` raw bytes to and from a file or an object at `place`."""
    return RawBucket(place, size) if isinstance(place, Prefix) else RawDisk(place, size)
