"""Train, resume and evaluate in a bucket, as a person runs it."""

from __future__ import annotations

import json
import re
import socket

import pytest

from tests.flows.harness import SMALL
from tests.s3 import proxy as faults

LOCAL = {".logs", ".spool", "mlflow.db", "mlartifacts"}


@pytest.fixture
def bucket(project, proxied_env, s3_root):
    """A project whose environment has the keys and nothing else, and the overrides that name a bucket."""
    project.env = {k: v for k, v in project.env.items() if not k.startswith("AWS_")} | proxied_env
    endpoint = project.env.pop("AWS_ENDPOINT_URL")
    return ["storage=s3", f"storage.root={s3_root}", f"storage.s3.endpoint={endpoint}"]


def local(project):
    return {path.name for path in (project.home / "runs").iterdir()}


@pytest.mark.long
def test_a_run_lives_in_a_bucket_from_training_to_its_champion_and_nothing_of_it_on_this_disk(
    project, bucket, proxy, s3_root
):
    stumbles = proxy.inject(faults.SLOW_DOWN, "put|part", key="step-000000010-", times=3)
    trained = project.cli("train", *SMALL, "run=2026_12_01", *bucket)
    assert trained.code == 0, trained
    assert stumbles.hits == 3
    assert f"run 2026_12_01  {s3_root}/2026_12_01  " in trained.out
    assert "checkpoints: 2 committed, 2 kept" in trained.out
    logs = re.search(r"logs of its ranks: (\S+)", trained.out)
    assert list((project.home / logs[1]).rglob("rank-00000.log"))

    # Every command that is printed leads to the same store.
    ls = re.search(r"(AWS_ENDPOINT_URL=\S+) python -m ckpt ls (\S+)", trained.out)
    assert ls[1] == f"AWS_ENDPOINT_URL={proxy.url}"
    assert re.search(rf"resume run=2026_12_01 .*storage=s3 storage.root={s3_root} ", trained.out)

    resumed = project.cli("resume", "run=2026_12_01", "trainer.max_steps=30", *bucket)
    assert resumed.code == 0, resumed
    assert "resume from step 20 (verified)" in resumed.out
    assert "changed: storage" not in resumed.out

    evaluated = project.cli("evaluate", "run=2026_12_01", "which=step:20", *bucket)
    assert evaluated.code == 0, evaluated
    assert re.search(r"evaluated: val [\d.]+ at step 20 -> models:/mlp@champion", evaluated.out)
    assert sorted(int(v.tags["ckpt.step"]) for v in project.versions("mlp")) == [10, 20, 30]
    assert all(v.tags["ckpt.uri"].startswith(s3_root) for v in project.versions("mlp"))

    # The champion is pinned: pruning to one leaves two.
    project.env["AWS_ENDPOINT_URL"] = proxy.url
    pruned = project.cli("ckpt", "prune", ls[2], "--keep-last", "1")
    assert pruned.code == 0, pruned
    listed = project.cli("ckpt", "ls", ls[2], "--json")
    assert sorted(c["step"] for c in json.loads(listed.out)["checkpoints"]) == [20, 30], listed

    assert local(project) == LOCAL
    assert not [p for p in project.home.rglob("*") if p.suffix == ".safetensors" or p.name == "manifest.json"]


def test_a_store_that_takes_no_more_stops_the_run_with_its_reason_and_a_code(project, bucket, proxy, s3_root):
    rule = proxy.inject(faults.DENIED, "put|part|begin", key=r"step-(?!000000005-).*\.safetensors$")
    done = project.cli(
        "train", *SMALL, "run=wren", *bucket, "tracking=none",
        "trainer.max_steps=100", "checkpoint.save.every=5", "checkpoint.max_failed_saves=2",
    )  # fmt: skip
    assert done.code == 1, done
    assert rule.hits >= 2
    assert re.search(r"2 saves in a row.*AccessDenied", done.out), done
    assert "1 committed, 1 kept" in done.out
    assert "newest step 5" in done.out
    assert "python -m flows.resume run=wren" in done.out
    assert done.err == ""


@pytest.mark.long
def test_the_demo_tells_its_story_on_an_object_store_of_its_own_and_leaves_none_behind(project):
    told = project.cli("demo_s3", "model=mlp", "data=digits", "checkpoint.when_busy=wait", timeout=280)
    assert told.code == 0, told
    assert "killing the trainer on purpose" in told.out
    assert re.search(r"resume from step \d+ \(verified\)", told.out)
    assert "equal bit for bit to the uninterrupted run" in told.out
    assert re.search(r"in the bucket: s3://runs/demo/\S+, \d+ objects", told.out)
    assert "on this disk:  nothing of the run" in told.out
    assert local(project) == LOCAL | {".prefect"}
    endpoint = re.search(r"SeaweedFS at http://127\.0\.0\.1:(\d+)", told.out)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(endpoint[1])), timeout=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"storage.root": "s3://no-such-bucket/runs"}, r"no-such-bucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, r"key"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, r"no credentials .*AWS_ACCESS_KEY_ID"),
        ({"storage.s3.endpoint": "http://127.0.0.1:9"}, r"http://127\.0\.0\.1:9"),
    ],
    ids=["bucket", "secret", "none", "endpoint"],
)
def test_what_is_wrong_with_the_store_is_one_line_before_training(project, bucket, changes, says):
    settings = {key: value for key, value in changes.items() if key.startswith("storage")}
    project.env |= {key: value for key, value in changes.items() if not key.startswith("storage")}
    before = local(project)
    done = project.cli("train", *SMALL, "run=wren", *bucket, *(f"{k}={v}" for k, v in settings.items()))
    assert done.code in (1, 2), done
    assert re.search(says, done.err), done
    assert len(done.err.strip().splitlines()) == 1, done
    assert done.out == ""
    assert local(project) == before
