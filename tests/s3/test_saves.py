"""Training that saves into a bucket whose store stumbles, refuses, or changes what it holds."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial

import pytest

import ckpt
from ckpt import manager as managing
from ckpt.errors import CheckpointError, StorageError
from ckpt.names import shard_name
from ckpt.policies import EverySteps
from ckpt.store import open_store
from ckpt.writer.options import WriterOptions
from tests.ckpt.managing import Toy, copy_of, same, wait_until
from tests.s3 import proxy as faults

SHARD = r"rank-00000\.safetensors$"


@pytest.fixture
def run_uri(proxied_env, s3_root, monkeypatch):
    """The address of a run behind the proxy; storage that keeps failing is given up within seconds."""
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "2")
    monkeypatch.setattr(managing, "WriterOptions", partial(WriterOptions, retry_s=0.5))
    return f"{s3_root}/run"


@pytest.fixture
def opened(run_uri):
    """Open managers over the run; what a test leaves open is closed."""
    made = []

    def open_one(state, **options):
        said: list[str] = []
        made.append(ckpt.CheckpointManager(run_uri, state, say=said.append, save=EverySteps(2), **options))
        made[-1].said = said
        return made[-1]

    yield open_one
    for each in made:
        each.close(save=False)


def train(manager, toy, upto):
    """Train to a step, waiting for each save; the states that were saved, by step."""
    states = {}
    while toy.count["step"] < upto:
        toy.train()
        step = toy.count["step"]
        states[step] = copy_of(toy.state)
        manager.step(step)
        wait_until(lambda: manager.stats.backlog == 0)
    return states


def steps(uri):
    return [each.step for each in ckpt.checkpoints(uri)]


def restored(opened):
    """A fresh manager's restore: the step, the state, and what was said on the way."""
    toy = Toy(seed=9)
    manager = opened(toy.state)
    found = manager.restore()
    return found.step, copy_of(toy.state), "\n".join(manager.said)


def test_a_store_that_says_slow_down_three_times_costs_time_and_no_checkpoint(run_uri, opened, proxy):
    rule = proxy.inject(faults.SLOW_DOWN, "put|part", key="step-000000002-", times=3)
    toy = Toy()
    manager = opened(toy.state)
    states = train(manager, toy, 2)
    manager.close(save=False)
    assert rule.hits == 3
    assert manager.stats.failed == 0
    step, state, _ = restored(opened)
    assert step == 2
    assert same(state, states[2])


def test_a_store_that_says_nothing_but_slow_down_stops_the_run_and_leaves_older_checkpoints(
    run_uri, opened, proxy, monkeypatch
):
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "1")
    proxy.inject(faults.SLOW_DOWN, "put|part|begin", key=r"step-00000000[4-9]-.*" + SHARD)
    toy = Toy()
    manager = opened(toy.state, max_failed_saves=2)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"2 saves in a row.*SlowDown"):
        train(manager, toy, 20)
    assert time.monotonic() - began < 30
    manager.close(save=False)
    proxy.clear()
    assert steps(run_uri) == [2]
    assert ckpt.verify(ckpt.latest_valid(run_uri)).ok


def test_keys_that_expire_in_a_save_are_renewed_and_it_commits(run_uri, opened, proxy, tmp_path, monkeypatch):
    keys = tmp_path / "keys.json"
    keys.write_text(
        json.dumps(
            {
                "Version": 1,
                "AccessKeyId": os.environ["AWS_ACCESS_KEY_ID"],
                "SecretAccessKey": os.environ["AWS_SECRET_ACCESS_KEY"],
            }
        )
    )
    script = tmp_path / "keys.py"
    asked = tmp_path / "asked"
    script.write_text(f"open({str(asked)!r}, 'a').write('x'); print(open({str(keys)!r}).read())")
    monkeypatch.setenv("CKPT_S3_CREDENTIAL_COMMAND", f"{sys.executable} {script}")
    toy = Toy()
    manager = opened(toy.state)
    states = train(manager, toy, 2)
    before = len(asked.read_text())
    rule = proxy.inject(faults.EXPIRED, "put|part", key="step-000000004-", times=1)
    states |= train(manager, toy, 4)
    manager.close(save=False)
    assert rule.hits == 1
    assert len(asked.read_text()) > before
    step, state, _ = restored(opened)
    assert step == 4
    assert same(state, states[4])


def test_keys_that_stay_expired_fail_saves_by_name_until_they_are_renewed(run_uri, opened, proxy):
    toy = Toy()
    manager = opened(toy.state)
    train(manager, toy, 2)
    proxy.inject(faults.EXPIRED, "put|part|begin")
    train(manager, toy, 5)
    assert manager.stats.failed == 1
    assert any("step 4" in line and "expired" in line for line in manager.said), manager.said
    proxy.clear()
    train(manager, toy, 6)
    manager.close(save=False)
    assert steps(run_uri) == [6, 2]


def test_a_checkpoint_whose_bytes_come_back_changed_is_named_and_the_one_before_is_taken(
    run_uri, opened, proxy
):
    toy = Toy()
    manager = opened(toy.state)
    states = train(manager, toy, 4)
    manager.close(save=False)
    proxy.inject(faults.FLIP_REPLY, "get", key="step-000000004-.*" + SHARD)
    step, state, said = restored(opened)
    assert step == 2
    assert same(state, states[2])
    assert "step-000000004-" in said


@pytest.mark.parametrize("change", [b"more", None], ids=["longer", "gone"])
def test_a_shard_of_another_length_is_no_checkpoint(run_uri, opened, change):
    toy = Toy()
    manager = opened(toy.state)
    states = train(manager, toy, 4)
    manager.close(save=False)
    newest = ckpt.latest_valid(run_uri)
    store, key = open_store(run_uri), f"{newest.attempt}/{shard_name(0)}"
    if change is None:
        store.delete(key)
    else:
        store.put(key, store.read(key) + change)
    assert not ckpt.verify(newest, quick=True).ok
    step, state, said = restored(opened)
    assert step == 2
    assert same(state, states[2])
    assert newest.attempt in said


def test_where_nothing_is_valid_a_restore_says_so_instead_of_starting_fresh(run_uri, opened, proxy):
    toy = Toy()
    manager = opened(toy.state)
    train(manager, toy, 2)
    manager.close(save=False)
    proxy.inject(faults.FLIP_REPLY, "get", key=SHARD)
    with pytest.raises(CheckpointError, match="step-000000002-"):
        restored(opened)
