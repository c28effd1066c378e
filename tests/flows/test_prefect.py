"""The flows on a real Prefect server: deployments, cancelling, retries, signals, and MLflow going away."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from flows import prefect_home
from tests.flows.harness import ENDLESS, SMALL, gone, wait_until

ROOT = Path(__file__).parents[2]


def prefect(project, *args, timeout=120):
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *args],
        cwd=ROOT,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def worker(project):
    """A process worker with the three deployments of prefect.yaml."""
    prefect(project, "work-pool", "create", "local", "--type", "process", "--overwrite")
    prefect(project, "--no-prompt", "deploy", "--all")
    log = (project.home / "worker.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local"],
        cwd=ROOT,
        env={**project.env, "PREFECT_WORKER_QUERY_SECONDS": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    yield process
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in gone(family, 5):
        each.kill()
    log.close()


def api(project):
    from prefect.client.orchestration import SyncPrefectClient

    return SyncPrefectClient(project.env["PREFECT_API_URL"])


def run_deployment(project, *overrides, flow="train"):
    listed = ",".join(f'"{o}"' for o in overrides)
    out = prefect(project, "deployment", "run", f"{flow}/local", "-p", f"overrides=[{listed}]")
    return re.search(r"UUID: ([0-9a-f-]{36})", out)[1]


def wait_for_state(project, flow_run, *names, timeout=150):
    def reached():
        with api(project) as client:
            state = client.read_flow_run(flow_run).state
        return state if state.name in names else None

    try:
        return wait_until(reached, timeout, every=0.5)
    except AssertionError:
        with api(project) as client:
            state = client.read_flow_run(flow_run).state
        raise AssertionError(f"{state}\n{(project.home / 'worker.log').read_text()}") from None


def ours(project):
    """Live processes that were started in this project."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CKPT_HOME") == str(project.home):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.timeout(600)
def test_a_deployment_trains_and_m1_cancelling_it_leaves_no_process(project, worker):
    flow_run = run_deployment(project, *SMALL)
    state = wait_for_state(project, flow_run, "Completed", "Failed", "Crashed")
    assert state.name == "Completed", state
    with api(project) as client:
        name = client.read_flow_run(flow_run).name
    assert (project.run_dir(name) / "run.json").is_file()
    assert [r.info.status for r in project.mlflow_runs()] == ["FINISHED"]

    endless = run_deployment(project, *ENDLESS, "run=cancelled")
    wait_until(lambda: list(project.run_dir("cancelled").glob("step-*/manifest.json")), 120)
    wait_until(lambda: len(project.mlflow_runs()) == 2)
    prefect(project, "flow-run", "cancel", endless)
    wait_for_state(project, endless, "Cancelled")
    wait_until(lambda: len([p for p in ours(project) if p.pid != worker.pid and not is_worker(p)]) == 0, 60)
    assert sorted(r.info.status for r in project.mlflow_runs()) == ["FINISHED", "KILLED"]
    verified = project.cli("ckpt", "verify", str(project.run_dir("cancelled")))
    assert verified.code == 0, verified
    assert list((project.run_dir("cancelled") / "launches").glob("*.end.json"))


def is_worker(process):
    try:
        return "prefect" in process.cmdline() or "ckpt.writer" in process.cmdline()
    except psutil.Error:
        return True


RETRIED = """
import json, os, signal, sys, threading, time
from pathlib import Path
from flows import prefect_flows
folder, overrides = Path(sys.argv[1]), sys.argv[2:]

def kill():
    launch = folder / "launches/00001.json"
    while not (launch.exists() and list(folder.glob("step-*/manifest.json"))):
        time.sleep(0.01)
    os.kill(json.loads(launch.read_text())["pid"], signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
flow = prefect_flows.train.with_options(retries=2, flow_run_name="again")
state = flow(overrides=overrides, return_state=True)
print("state", state.name)
sys.exit(0 if state.is_completed() else 1)
"""


@pytest.mark.long
def test_m3_a_retry_goes_on_from_the_newest_checkpoint_in_the_same_run(project):
    args = ["debug=smoke", "run=again", "trainer.max_steps=4000", "checkpoint.save.every=100"]
    done = subprocess.run(
        [sys.executable, "-c", RETRIED, str(project.run_dir("again")), *args],
        cwd=project.home,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"resume from step \d+00", done.stdout)
    assert [p.name for p in (project.home / "runs").iterdir() if p.name[0] != "."].count("again") == 1
    (run,) = project.mlflow_runs()
    assert run.info.status == "FINISHED"


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
def test_m5_sigterm_to_the_flow_ends_it_within_the_grace_with_a_valid_checkpoint(project, started, times):
    training = started("train", *ENDLESS, "run=term")
    training.expect(r"saved \d+", timeout=150)
    family = training.family()
    for _ in range(times):
        training.signal(signal.SIGTERM)
        time.sleep(0.2)
    assert training.wait(30) != 0
    assert gone(family, 30) == []
    verified = project.cli("ckpt", "verify", str(project.run_dir("term")))
    assert verified.code == 0, verified


@pytest.mark.long
def test_m5_sigterm_to_a_rank_alone_saves_and_ends_everything(project, started):
    training = started("train", *ENDLESS, "run=rank")
    training.expect(r"saved \d+", timeout=150)
    family = training.family()
    pid = json.loads((project.run_dir("rank") / "launches" / "00001.json").read_text())["pid"]
    psutil.Process(pid).send_signal(signal.SIGTERM)
    assert training.wait(40) == 143, training.out
    assert gone(family, 10) == []
    assert "python -m flows.resume run=rank" in training.out


@pytest.mark.long
def test_o1_sigterm_while_registering_ends_in_time_and_the_next_flow_catches_up(project, started):
    # MLflow hangs, so the flow is still registering when training has long ended.
    with SilentServer() as address:
        training = started("train", *SMALL, "run=late", f"tracking.uri={address}")
        training.expect(r"step 20/20", timeout=150)
        training.signal(signal.SIGTERM)
        training.wait(30)
    caught_up = project.cli("resume", "run=late", f"tracking.uri={project.mlflow_uri}")
    assert caught_up.code == 0, caught_up
    assert sorted(int(v.tags["ckpt.step"]) for v in project.versions("mlp")) == [10, 20]
    (run,) = project.mlflow_runs()
    assert run.info.status == "FINISHED"


@pytest.mark.long
def test_l1_training_does_not_notice_that_mlflow_is_away(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: every connection is refused
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = project.cli("train", *SMALL, "run=alone", f"tracking.uri={address}")
    assert done.code == 0, done
    assert "MLflow is away" in done.out
    verified = project.cli("ckpt", "verify", str(project.run_dir("alone")))
    assert verified.code == 0, verified
    # Its metrics waited, and are sent when it is there again.
    later = project.cli("resume", "run=alone", f"tracking.uri={project.mlflow_uri}", "trainer.max_steps=25")
    assert later.code == 0, later
    (run,) = project.mlflow_runs()
    client = project.mlflow()
    wait_until(lambda: {m.step for m in client.get_metric_history(run.info.run_id, "loss")} >= {5, 20, 25})


@pytest.mark.long
def test_l1_training_does_not_wait_for_an_mlflow_that_hangs(project):
    with SilentServer() as address:
        began = time.monotonic()
        done = project.cli("train", *SMALL, "run=alone", f"tracking.uri={address}")
        assert done.code == 0, done
        assert "MLflow is away" in done.out
        assert time.monotonic() - began < 120


class SilentServer:
    """Accepts connections and never answers."""

    def __enter__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open = []

        def accept():
            while True:
                try:
                    self._open.append(self._server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def __exit__(self, *_):
        self._server.close()
        for each in self._open:
            each.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_tells_its_story_alone_in_the_world_and_again(project):
    for name in [n for n in project.env if n.startswith("PREFECT_")]:
        del project.env[name]
    names = set()
    for _ in range(2):
        told = project.cli("demo", "model=mlp", "data=digits", "checkpoint.when_busy=wait", timeout=280)
        assert told.code == 0, told
        name = re.search(r"^run ([a-z]+-[a-z]+)  ", told.out, re.MULTILINE)[1]
        names.add(name)
        assert re.search(r"killing the trainer on purpose \(step \d+\)", told.out), told
        assert re.search(r"resume from step \d+0 \(verified\)", told.out)
        assert "finished 200: equal bit for bit to the uninterrupted run" in told.out
        assert re.search(r"evaluated: val [\d.]+ at step 200", told.out)
        assert f"next:  python -m flows.resume run={name} trainer.max_steps=400" in told.out
        steps = sorted(
            int(v.tags["ckpt.step"]) for v in project.versions("mlp") if f"/{name}/" in v.tags["ckpt.uri"]
        )
        assert steps == list(range(20, 201, 20))
    assert len(names) == 2


@pytest.mark.long
def test_the_pages_of_both_databases_are_served_until_ctrl_c(project, started):
    for name in [n for n in project.env if n.startswith("PREFECT_")]:
        del project.env[name]
    pages = started("ui")
    for page in ("Prefect", "MLflow"):
        url = pages.expect(rf"{page} +(http://127\.0\.0\.1:\d+)", timeout=180)[1]
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b"<html" in answer.read().lower()
    family = pages.family()
    pages.ctrl_c()
    assert pages.wait(30) == 0
    assert gone(family) == []


def test_a_flow_without_a_server_starts_one_and_leaves_none_behind(project, started):
    for name in [n for n in project.env if n.startswith("PREFECT_")]:
        del project.env[name]
    training = started("train", *ENDLESS, "run=own")
    training.expect(r"saved \d+", timeout=150)
    wait_until(lambda: any("uvicorn" in p.cmdline() for p in training.family()))
    wait_until(lambda: prefect_home_is_ready(project), 120)
    family = training.family()
    training.signal(signal.SIGKILL)
    training.wait()
    assert gone(family, 40) == []
    assert list((project.run_dir("own") / "launches").glob("00001.end.json")), (
        "the ranks saved and stopped by themselves"
    )


def prefect_home_is_ready(project):
    return (project.home / "runs" / ".prefect" / "prefect.db").exists()


def test_the_flow_process_imports_no_torch():
    code = (
        "import sys; import flows.cli, flows.prefect_flows, flows.demo, flows.ui, flows.tracking;"
        "import mlflow.models; from mlflow import MlflowClient;"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_configured_for_prefect_is_respected(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("PREFECT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://x/api")
    assert not prefect_home.configure()
    monkeypatch.delenv("PREFECT_API_URL")
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "profiles.toml").write_text(
        'active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://y/api"\n'
    )
    assert not prefect_home.configure()
    monkeypatch.setenv("PREFECT_PROFILE", "ephemeral")
    assert prefect_home.configure()


@pytest.mark.long
def test_without_its_prefect_server_a_flow_saves_says_so_and_ends(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        project.env["PREFECT_API_URL"] = f"http://127.0.0.1:{taken.getsockname()[1]}/api"
        done = project.cli("train", *ENDLESS, "run=alone")
    assert done.code == 1, done
    assert "Prefect" in done.out
    assert "python -m flows.resume run=alone" in done.out
    wait_until(lambda: ours(project) == [], 60)  # metrics wait a while for an MLflow that may still come
