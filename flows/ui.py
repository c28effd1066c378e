"""`make ui`: the pages of Prefect and MLflow over the databases under runs/, on this machine only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from flows import prefect_home
from flows.config import load
from flows.overrides import ConfigError

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
READY_S = 90.0


def main() -> int:
    """Serve both until Ctrl-C, a SIGTERM or the terminal's end. Arguments are overrides, for a tracking.uri
    of your own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        uri = load("train", sys.argv[1:]).values["tracking"]["uri"]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    prefect_home.isolate()
    prefect_home.configure()
    pages = {"Prefect": _prefect(_port(PREFECT_PORT))}
    if uri is not None and uri.startswith("sqlite:"):
        pages["MLflow"] = _mlflow(uri, _port(MLFLOW_PORT))
    elif uri is not None:
        print(f"MLflow   {uri}")
    try:
        for name, (process, url) in pages.items():
            if not _ready(process, url):
                print(f"{name} did not start", file=sys.stderr)
                return 1
            print(f"{name:8} {url}", flush=True)
        print("Ctrl-C ends both", flush=True)
        while all(process.poll() is None for process, _ in pages.values()):
            time.sleep(0.5)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for process, _ in pages.values():
            _end(process)


Page = tuple["subprocess.Popen[bytes]", str]


def _prefect(port: int) -> Page:
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "PREFECT_API_URL": f"{url}/api", "PREFECT_UI_API_URL": f"{url}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    return _start(command, env), url


def _mlflow(uri: str, port: int) -> Page:
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri,
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    return _start(command, {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}), f"http://127.0.0.1:{port}"


def _start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and the workers in its session."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _port(wanted: int) -> int:
    """The usual port, or any free one if that is taken."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", wanted))
        except OSError:
            sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
