"""`python -m bench` on an object store: a real one on this machine, started by the benchmark itself."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import children, disk, engines, places, report, results, verdict
from bench.engines import KEYS
from bench.options import parse
from bench.places import LOCAL, Prefix
from bench.spec import Spec
from bench.workload import Workload
from ckpt.store import open_store
from flows import object_server
from tests.bench.made import limits, outcome

ROOT = Path(__file__).resolve().parents[2]
BUCKET = Spec(100, 3, 1, "cpu", 24, (), False, "s3://bench/there")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The spec of short measurements in a bucket of a store that is started for them."""
    folder = tmp_path_factory.mktemp("store")
    asked = Spec(3_000_000, 12, 1, "cpu", 2, (), True, LOCAL, str(folder), batch=8, window=2)
    with places.temporary(asked, "tests") as given:
        yield given
    assert list(folder.iterdir()) == []


def measured(key, bucket):
    found = children.measure(key, bucket, lambda _: None)
    assert (found.status, found.reason) == ("ok", "")
    assert open_store(bucket.folder).list() == []
    return found


def test_raw_bytes_go_to_a_bucket_and_back(bucket):
    size = 40_000_000  # three parts
    raw = disk.raw(Prefix(f"{bucket.folder}/raw"), size)
    store = open_store(bucket.folder)
    for _ in range(2):
        begun = time.monotonic()
        raw.begin("write")
        written = raw.wait()
        assert begun < written.at < time.monotonic()
        assert 0 < written.seconds <= written.at - begun
        assert store.size("raw") == size
    raw.begin("read")
    assert raw.wait().seconds > 0
    raw.close()
    assert store.list() == []


def test_raw_bytes_that_a_bucket_does_not_take_are_an_error_with_its_cause(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    raw = disk.raw(Prefix(f"{bucket.folder}/raw"), 1000)
    raw.begin("write")
    with pytest.raises(OSError, match="AWS_SECRET_ACCESS_KEY"):
        raw.wait()


def test_the_own_engine_is_measured_in_a_bucket_and_leaves_nothing_there(bucket):
    figures = measured("engine", replace(bucket, windows_only=True)).figures
    assert len(figures["costs"]["durable_s"]) == 2
    assert "reads back" in figures["note"]


@pytest.mark.parametrize("key", ["engine", "upload", "dcp_save"])
def test_what_was_saved_to_a_bucket_comes_back_and_can_be_discarded(key, bucket):
    if engines.unfit_for_buckets(key):
        pytest.skip(engines.unfit_for_buckets(key))
    work = Workload(1_000_000, 12, "cpu")
    engine = engines.make(key)
    engine.prepare(work, Prefix(f"{bucket.folder}/{key}"))
    assert key != "dcp_save" or engine.title == "dcp.save, s3fs"
    try:
        for step in (0, 1):
            work.forward_backward(2)
            engine.save(step)
            saved = work.digests()
            engine.before_step()
            work.update()
            begun = engine.wait_durable()
            assert begun <= time.monotonic()
        assert work.digests() != saved
        engine.load(1, work)
        assert work.digests() == saved
        engine.discard(0)
        names = [entry.name for entry in open_store(f"{bucket.folder}/{key}").list()]
        assert "step-0" not in names
    finally:
        engine.close()
        open_store(bucket.folder).delete_tree(key)


@pytest.mark.long
def test_saves_to_a_bucket_can_be_made_to_fail_for_the_memory_they_take(bucket):
    assert len(measured("failing", bucket).memory) == bucket.memory_saves


@pytest.mark.long
@pytest.mark.parametrize("key", [key for key in KEYS if key != "null"])
def test_every_other_engine_that_can_saves_to_a_bucket(key, bucket):
    if engines.unfit_for_buckets(key):
        pytest.skip(engines.unfit_for_buckets(key))
    restored = measured(key, bucket).figures["restore"]
    assert restored is None if key == "floor" else restored["different"] == []


@pytest.mark.long
def test_a_quick_run_in_a_bucket_ends_with_all_figures_and_a_verdict(tmp_path):
    found_at = tmp_path / "found.json"
    options = ["--quick", "--size=3", "--pairs=2", f"--storage={LOCAL}", f"--json={found_at}"]
    asked = ["--engines=torch_save,dcp_save,engine"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CKPT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "bench", *options, *asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found_at.exists(), done.stderr
    found = json.loads(found_at.read_text())
    assert all(problem.startswith(("discard", "not conclusive")) for problem in found["problems"])
    assert found["engines"]["dcp_save"]["equal"] is found["engines"]["engine"]["equal"] is True
    assert found["engines"]["torch_save"]["reason"] == "it writes files, not objects"
    assert set(found["beside"]) == {"upload", "folder"}
    assert all(target["met"] is not None for target in found["verdict"] if "raw" in target["asked"])
    assert not (tmp_path / "home" / "runs").exists()


def test_a_run_in_a_bucket_names_all_engines_and_measures_a_folder_beside(monkeypatch, tmp_path, capsys):
    asked = []

    def measure(job, spec, progress):
        asked.append((job, spec.folder, spec.windows_only))
        return limits() if job == "limits" else outcome([0.0], durable_s=0.3)

    monkeypatch.setenv("CKPT_HOME", str(tmp_path))
    monkeypatch.setattr(children, "measure", measure)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    here = parse([]).spec.disk
    assert command.main([f"--storage={LOCAL}"]) == 0
    assert asked == [
        ("limits", LOCAL, False),
        ("null", LOCAL, False),
        ("floor", LOCAL, False),
        ("engine", LOCAL, False),
        ("failing", LOCAL, False),
        ("upload", LOCAL, True),
        ("engine", here, True),
        ("null", LOCAL, True),
        ("limits", LOCAL, False),
    ]
    shown = capsys.readouterr().out
    assert "PUT 250.0 ms, GET 250.0 ms" in shown
    for key in KEYS:
        if key.startswith("dcp_"):
            assert f"{key} is absent: s3fs, by which it reaches a bucket, is not installed" in shown
        if key.startswith("torch_"):
            assert f"{key} is absent: it" in shown


def judged(beside=None, **own):
    outcomes = {
        "null": outcome(),
        "dcp_save": outcome([3.0], durable_s=3.0, restore=2.0),
        "engine": outcome([0.1], **own),
    }
    told = {"memcpy_s": 0.1, "write_s": 0.9, "read_beside_s": 0.45, "read_s": 0.4, "state_bytes": 20}
    told |= {"direct": False, "step_s": 0.1, "window": 4}
    found = results.summarize(BUCKET, told, outcomes, None, beside or {})
    return {(row["name"], row["asked"]): (row["measured"], row["met"]) for row in found["verdict"]}, found


def test_the_verdict_in_a_bucket_is_about_raw_requests_s3fs_and_a_folder():
    beside = {"upload": outcome(durable_s=1.0), "folder": outcome(stall_s=0.002, join_s=0.0)}
    rows, found = judged(beside, durable_s=1.5, restore=0.5, stall_s=0.002, join_s=0.001)
    assert rows["upload", "0.9 x the raw PUT's speed"] == ("0.9 x the raw PUT's speed", True)
    assert rows["durable", "0.9 x raw PUT and GET's speed"] == ("0.9 x raw PUT and GET's speed", True)
    assert rows["durable", "2 x dcp.save's speed"] == ("2 x dcp.save's speed", True)
    assert rows["verified restore", "0.8 x the raw GET's speed"] == ("0.8 x the raw GET's speed", True)
    assert rows["stall + join", "1.5 x the folder's"] == ("1.5 x the folder's", True)
    assert not any("raw write" in asked or "raw read" in asked for _, asked in rows)
    assert "asked: 1.5 x the folder's" in report.table(found)
    rows, _ = judged(beside, durable_s=1.6, restore=0.51, stall_s=0.003, join_s=0.001)
    assert [met for (name, asked), (_, met) in rows.items() if "speed" in asked or "folder" in asked] == [
        True, False, False, False, False,
    ]  # fmt: skip


def test_what_was_not_measured_beside_a_bucket_is_neither_met_nor_missed():
    rows, found = judged({"folder": children.Outcome("failed", "no room")}, durable_s=1.5)
    assert rows["upload", "0.9 x the raw PUT's speed"] == ("not measured", None)
    assert rows["stall + join", "1.5 x the folder's"] == ("not measured", None)
    assert found["problems"] == ["engine, folder: no room"]
    asked = {target.asked for target in verdict.judge({}, {}, BUCKET, 2)}
    assert asked == set()


@pytest.mark.parametrize(
    "address, endpoint, about",
    [
        ("s3:/bucket/x", None, "s3://bucket/x meant?"),
        ("s3://Bucket/x", None, "can't be a bucket"),
        ("s3://", None, "names no bucket"),
        ("gs://bucket/x", None, "give a folder or s3://BUCKET/PREFIX"),
        ("s3://bucket/x", "localhost:9000", "AWS_ENDPOINT_URL"),
    ],
)
def test_an_address_that_is_none_is_one_clear_line(address, endpoint, about, monkeypatch, capsys):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SystemExit) as ended:
        parse([f"--storage={address}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert about in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("what", ["endpoint", "bucket"])
def test_a_store_that_is_not_there_is_said_before_anything_is_measured(
    what, bucket, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("CKPT_HOME", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setattr(command, "_measure", lambda _: pytest.fail("measured"))
    if what == "endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("CKPT_S3_DEADLINE_S", "0.2")
    assert command.main(["--storage=s3://nothing-here/x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench: can't write s3://nothing-here/x/")
    assert len(said.splitlines()) == 1
    assert list(tmp_path.rglob("bench-*")) == []


def test_without_a_store_to_start_nothing_is_measured_and_it_is_said_how_to_get_one(monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setattr(object_server.shutil, "which", lambda *_, **__: None)
    assert command.main([f"--storage={LOCAL}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bench: SeaweedFS is not installed: install it with")
    assert len(said.splitlines()) == 1


def test_folders_know_nothing_of_buckets(tmp_path):
    place = places.place_of(replace(BUCKET, folder=str(tmp_path)))
    assert place == tmp_path
    assert places.place_of(BUCKET) / "raw" == Prefix("s3://bench/there/raw")
