"""Which Prefect API a command-line flow talks to: the one you have configured, or a server of its own for
the while.

The server is started before Prefect is imported here, and needs no one to have started anything first. It
runs in a session of its own, so the terminal's Ctrl-C does not reach it and the flow can still report its
end; it dies with this process, whatever that dies of.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from flows.project import project_dir

READY_S = 90.0
_PR_SET_PDEATHSIG = 1

# Quiet, private, and nothing sent anywhere.
_DEFAULTS = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}


class ServerError(Exception):
    """Prefect's server could not be started; the text holds what it said."""


def home() -> Path:
    """The folder of this project's own Prefect database."""
    return project_dir() / "runs" / ".prefect"


def configure() -> bool:
    """Set what must be set before Prefect is imported. True if a server of our own is needed."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("PREFECT_API_URL"):
        return False
    if not os.environ.get("PREFECT_HOME"):
        if _profile_has_api(Path.home() / ".prefect"):
            return False
        os.environ["PREFECT_HOME"] = str(home())
    return not _profile_has_api(Path(os.environ["PREFECT_HOME"]))


def isolate() -> None:
    """Be alone in the world: this project's own Prefect database, whatever else is configured on this
    machine."""
    for name in [n for n in os.environ if n.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ["PREFECT_HOME"] = str(home())


def _profile_has_api(folder: Path) -> bool:
    """Whether the active profile under a Prefect home names an API."""
    try:
        page = tomllib.loads((folder / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    name = os.environ.get("PREFECT_PROFILE") or page.get("active")
    profile = page.get("profiles", {}).get(name, {})
    return bool(isinstance(profile, dict) and profile.get("PREFECT_API_URL"))


class OwnServer:
    """A Prefect API server for as long as this process lives. `start` returns at once; `wait` until it
    answers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Its API address."""
        return f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        """Start it, and point Prefect's clients in this process at it. Call from the main thread only: the
        server is tied to the life of the thread that starts it."""
        Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
        self._port = _free_port()
        self._process = subprocess.Popen(
            _command(self._port),
            env={
                **os.environ,
                "PREFECT_API_URL": "",
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=_log().open("wb"),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        os.environ["PREFECT_API_URL"] = self.url

    def wait(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the server answers; False as soon as `cancelled()`. ServerError if it dies or takes too
        long."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if cancelled():
                return False
            if self._process is None or self._process.poll() is not None:
                raise ServerError(
                    f"Prefect's server did not start:\n{_log().read_text(errors='replace')[-2000:]}"
                )
            if _healthy(self.url):
                return True
            time.sleep(0.05)
        raise ServerError(
            f"Prefect's server gave no answer within {READY_S:.0f} s; its output is in {_log()}"
        )

    def stop(self) -> None:
        """End it, waiting a moment for it to close its database."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _command(port: int) -> list[str]:
    spec = importlib.util.find_spec("prefect")  # the package itself is not imported by this
    assert spec is not None and spec.origin is not None
    return [
        sys.executable, "-m", "uvicorn", "--app-dir", str(Path(spec.origin).parent), "--factory",
        "prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port),
        "--log-level", "error", "--lifespan", "on",
    ]  # fmt: skip


def _log() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "server.log"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
