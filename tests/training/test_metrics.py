import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.training.waiting import until
from training import metrics_sender
from training.metrics import Metrics
from training.spool import Line, Spool


def rows(folder):
    if not (folder / "metrics.sqlite").exists():
        return []
    with closing(sqlite3.connect(folder / "metrics.sqlite")) as table:
        try:
            return table.execute("SELECT key, step, value, sent FROM line ORDER BY id").fetchall()
        except sqlite3.OperationalError:
            return []


def spooled(folder, *lines):
    spool = Spool(folder)
    spool.add(lines)
    spool.close()


def point_to(folder, uri="nowhere"):
    (folder / "tracking.json").write_text(json.dumps({"uri": uri, "run_id": "r"}))


class Server:
    """Takes lines like a tracking server; fails as often as told."""

    def __init__(self, failures=0):
        self.got, self.failures = [], failures

    def __call__(self, tracking):
        return self.send

    def send(self, lines):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        self.got.extend(lines)


def deliver(folder, server, drain_s=5.0):
    ended = threading.Event()
    ended.set()
    metrics_sender.deliver(folder, ended, drain_s, server)


def test_a_step_that_is_repeated_after_a_resume_is_sent_once(tmp_path):
    spooled(tmp_path, Line("loss", 1, 0.5, 10), Line("loss", 2, 0.25, 20))
    point_to(tmp_path)
    server = Server()
    deliver(tmp_path, server)
    spooled(tmp_path, Line("loss", 2, 0.25, 99), Line("loss", 3, 0.125, 100))
    deliver(tmp_path, server)
    assert [(line.step, line.value) for line in server.got] == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_l1_lines_wait_on_disk_while_the_server_is_away_and_are_sent_later(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_sender, "BACKOFF_S", (0.01, 0.05))
    spooled(tmp_path, *(Line("loss", step, 1.0 / step, step) for step in range(1, 8)))
    point_to(tmp_path)
    server = Server(failures=3)
    deliver(tmp_path, server)
    assert [line.step for line in server.got] == list(range(1, 8))


def test_nan_and_infinity_arrive(tmp_path):
    spooled(tmp_path, Line("a", 1, math.nan, 1), Line("b", 1, -math.inf, 1))
    point_to(tmp_path)
    server = Server()
    deliver(tmp_path, server)
    assert math.isnan(server.got[0].value)
    assert server.got[1].value == -math.inf


def test_lines_stay_for_the_next_launch_if_no_server_was_named(tmp_path):
    spooled(tmp_path, Line("loss", 1, 0.5, 10))
    deliver(tmp_path, Server(), drain_s=0.2)
    server = Server()
    point_to(tmp_path)
    deliver(tmp_path, server)
    assert len(server.got) == 1


def test_two_senders_of_one_folder_never_send_the_same_line(tmp_path):
    spooled(tmp_path, *(Line("loss", step, 0.0, step) for step in range(5000)))
    point_to(tmp_path)
    server = Server()
    threads = [threading.Thread(target=deliver, args=(tmp_path, server, 20.0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.step for line in server.got) == list(range(5000))


def test_l1_a_hanging_server_never_holds_training_up(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as hanging:  # accepts, never answers
        point_to(tmp_path, f"http://127.0.0.1:{hanging.getsockname()[1]}")
        metrics = Metrics(tmp_path)
        slowest = 0.0
        for step in range(3000):
            before = time.perf_counter()
            metrics.put(step, {"loss": 1.0})
            slowest = max(slowest, time.perf_counter() - before)
        before = time.perf_counter()
        metrics.close(timeout=20.0)
        closing_s = time.perf_counter() - before
        assert slowest < 0.5  # a scheduler's hiccup at most; a request would wait for seconds
        assert closing_s < 20.0
        until(lambda: len(rows(tmp_path)) == 3000, 20, "all lines in the spool")
        assert not any(sent for *_, sent in rows(tmp_path))
        end_sender(tmp_path)


def test_the_sender_outlives_a_killed_trainer_and_its_process_group(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from training.metrics import Metrics\n"
        "m = Metrics(Path(sys.argv[1]))\n"
        "for step in range(50): m.put(step, {'loss': 0.5})\n"
        'm._queue.put(b\'{"step": 50, "at": 1, "values": {"last": 1.0}}\\n\')\n'
        "while not m._queue.empty(): time.sleep(0.01)\n"
        "time.sleep(0.2); print('handed over', flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert trainer.stdout.readline() == "handed over\n"
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    until(lambda: len(rows(tmp_path)) == 51, 20, "the lines handed over before the kill")
    end_sender(tmp_path)


def end_sender(folder):
    """End the sender that this test's folder belongs to; it would go on trying for half a minute."""
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"training.metrics_sender" in words and str(folder).encode() in words:
            os.kill(int(entry), signal.SIGKILL)


@pytest.mark.long
def test_lines_arrive_in_a_real_mlflow_run_each_once(tmp_path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run_id = client.create_run(client.create_experiment("toys")).info.run_id
    spooled(tmp_path, *(Line("loss", step, 1.0 / step, step) for step in range(1, 6)))
    (tmp_path / "tracking.json").write_text(json.dumps({"uri": client.tracking_uri, "run_id": run_id}))
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "training.metrics_sender", str(tmp_path)],
            stdin=subprocess.DEVNULL,
            check=True,
        )
    spool = Spool(tmp_path)
    until(lambda: spool.count_unsent() == 0, 60, "all lines sent")
    spool.close()
    history = client.get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(s, 1.0 / s) for s in range(1, 6)]
