"""Run the flows' command lines as a person would, in a project folder of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SMALL = ("debug=smoke",)
# Trains until it is stopped.
ENDLESS = ("debug=smoke", "trainer.max_steps=1000000", "checkpoint.save.every=200", "trainer.log_every=50")


class Project:
    """A place to run commands in: `home` takes runs/, its databases and whatever else they write."""

    def __init__(self, home: Path, api_url: str | None) -> None:
        self.home = home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "CKPT_"))}
        self.env |= {"CKPT_HOME": str(home), "DO_NOT_TRACK": "true", "PYTHONUNBUFFERED": "1"}
        # This tree's code, whichever one is installed.
        self.env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        if api_url:
            self.env["PREFECT_API_URL"] = api_url
            self.env["PREFECT_HOME"] = str(home / "prefect")

    @property
    def mlflow_uri(self) -> str:
        return f"sqlite:///{self.home}/runs/mlflow.db"

    def run_dir(self, name: str) -> Path:
        return self.home / "runs" / name

    def cli(self, name: str, *args: str, timeout: float = 150) -> Done:
        module = name if name == "ckpt" else f"flows.{name}"
        done = subprocess.run(
            [sys.executable, "-m", module, *args],
            cwd=self.home,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, flow: str, *args: str) -> Started:
        return Started(self, [sys.executable, "-m", f"flows.{flow}", *args])

    def mlflow(self):
        from flows import tracking

        return tracking.client(self.mlflow_uri)

    def mlflow_runs(self):
        client = self.mlflow()
        experiments = [e.experiment_id for e in client.search_experiments()]
        return client.search_runs(experiments)

    def versions(self, name: str):
        return self.mlflow().search_model_versions(f"name = '{name}'")


class Done:
    """A command that has ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n--- stderr\n{self.err}"


class Started:
    """A command that runs, in a process group of its own as under a terminal."""

    def __init__(self, project: Project, command: list[str]) -> None:
        self._log = project.home / f"out-{time.monotonic_ns()}.txt"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=project.home,
                env=project.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def out(self) -> str:
        return self._log.read_text(errors="replace")

    def expect(self, pattern: str, timeout: float = 120) -> re.Match[str]:
        """Wait for a line."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = re.search(pattern, self.out)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} (exit code {self.process.poll()}) in:\n{self.out}")

    def family(self) -> list[psutil.Process]:
        """Everything it has started that lives, itself left out."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def ctrl_c(self) -> None:
        """What a terminal does: SIGINT for its whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout: float = 60) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout} s:\n{self.out}") from None

    def end(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        if self.process.poll() is None:
            family = self.family()
            self.process.kill()
            self.process.wait()
            for each in family:
                if each.is_running():
                    each.kill()


def gone(processes: list[psutil.Process], timeout: float = 10) -> list[psutil.Process]:
    """Those that still live after `timeout` seconds; a writer that drains in a session of its own may take
    some."""
    return psutil.wait_procs(processes, timeout=timeout)[1]


def wait_until(what, timeout: float = 60, every: float = 0.05):
    """Wait until `what()` is true, and return what it returned."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"not within {timeout} s")
