"""A run's life in a bucket: launches, fencing, heartbeats, commits, discovery and retention."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import ckpt
from ckpt import liveness, retention
from ckpt.commit import commit, posthumous
from ckpt.errors import Fenced, NotCommitted, RunBusy, StorageError
from ckpt.fence import launch_numbers
from ckpt.launches import begin_launch, read_launch, record_end, record_parent
from ckpt.listing import of_run, run_text, runs_in
from ckpt.names import attempt_name, part_name
from ckpt.policies import KeepLast
from ckpt.run import open_run
from ckpt.store import open_store
from ckpt.stores import client
from tests.ckpt import making
from tests.s3 import proxy as faults


@pytest.fixture
def run(proxied_env, s3_root):
    return open_run(f"{s3_root}/run")


def begin(run, **more):
    return begin_launch(run, owner="", config={"lr": 0.1}, say=lambda _: None, **more)


def test_a_run_lives_in_a_bucket_as_it_does_in_a_folder(run, s3_root):
    first = begin(run)
    assert open_run(run.uri + "/", create=False).id == run.id
    with pytest.raises(RunBusy, match="launch 1"):
        begin(open_run(run.uri))
    record_parent(run, first, None)
    made = [making.checkpoint(run, step) for step in (5, 10, 15)]
    assert ckpt.latest_valid(run.uri) == made[-1]
    assert [item.step for item in ckpt.checkpoints(run.uri)] == [15, 10, 5]
    assert ckpt.verify(made[0].uri).ok
    liveness.beat(run.store, 1, 7, step=15, phase=liveness.TRAINING)
    assert liveness.read_beat(run.store, 1)["counter"] == 7
    second = begin(open_run(run.uri, takeover=True))
    assert launch_numbers(run.store) == [1, 2] and second.number == 2
    left = making.write_attempt(run, 20)
    with pytest.raises(Fenced, match="overtaken by launch 2"):
        commit(run.store, left, 1, 1, run.id)
    assert posthumous(run, 2) == [left]
    record_parent(run, second, ckpt.latest_valid(run.uri))
    assert record_end(run, second, "finished") and not record_end(run, second, "failed")
    assert read_launch(run.store, 2).end["outcome"] == "finished"
    doomed = retention.doomed([item.fact for item in ckpt.checkpoints(run.uri)], KeepLast(2), set())
    assert retention.prune(run.store, doomed, 2) == [] and len(doomed) == 2
    assert [item.step for item in ckpt.checkpoints(run.uri)] == [20, 15]
    assert not {entry.name for entry in run.store.list()} & set(doomed)
    assert "20" in run_text(of_run(run))
    assert [item["name"] for item in runs_in(open_store(s3_root))] == ["run"]
    with pytest.raises(NotCommitted, match="there are run"):
        open_run(f"{s3_root}/runn", create=False)


def test_of_launches_that_begin_at_once_one_has_each_number(run):
    opened = open_run(run.uri, takeover=True)
    with ThreadPoolExecutor(4) as pool:
        numbers = [launch.number for launch in pool.map(lambda _: begin(opened), range(4))]
    assert sorted(numbers) == launch_numbers(run.store) == [1, 2, 3, 4]


@pytest.mark.parametrize("action", [faults.LOST_REPLY, faults.SLOW_DOWN, faults.RESET])
def test_a_launch_and_a_commit_come_through_a_store_that_stumbles(run, proxy, action):
    for key in (r"launches/00001.json$", r"parent.json$", r"manifest.json$", r"run.json$"):
        proxy.inject(action, key=key, times=1)
    launch = begin(run)
    assert launch.number == 1 and launch_numbers(run.store) == [1]
    record_parent(run, launch, None)
    made = making.checkpoint(run, 5)
    assert ckpt.latest_valid(run.uri) == made


def test_the_latest_of_two_thousand_is_found_by_listings_launch_files_and_four_requests(run, proxy):
    for number in range(1, 21):
        making.launch(run, number, fresh=number == 1)
    making.checkpoint(run, 2000, 20)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda step: run.store.put(f"{attempt_name(step, 1 + step // 100)}/{part_name(0)}", b"{}"),
                range(1, 2000),
            )
        )
    proxy.clear()
    assert ckpt.latest_valid(run.uri, verify="quick").step == 2000
    counts = proxy.counts()
    launch_files = len(proxy.seen("get", "launches/"))
    assert counts["list"] <= 4
    assert sum(counts.values()) <= counts["list"] + launch_files + 4


def test_an_endpoint_that_is_not_there_is_named_within_seconds(proxied_env, s3_root, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_CONTACT_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"http://127.0.0.1:1 can't be reached: check AWS_ENDPOINT_URL"):
        open_run(f"{s3_root}/run")
