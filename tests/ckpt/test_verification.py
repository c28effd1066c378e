import os
import random

import pytest

import ckpt
from ckpt.digest import CHUNK
from ckpt.errors import NotCommitted, StorageError
from ckpt.names import MANIFEST, shard_name
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    return making.run_at(tmp_path / "run")


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
def test_every_changed_byte_of_a_shard_is_found(run, kind):
    made = making.checkpoint(run, 5, kind=kind)
    path = run.store.path(f"{made.attempt}/{shard_name(0)}")
    whole = path.read_bytes()
    assert ckpt.verify(made).ok
    for at in random.Random(0).sample(range(len(whole)), 40):
        making.flip(path, at)
        report = ckpt.verify(made.uri)
        assert not report.ok and shard_name(0) in report.problems[0]
        assert ckpt.verify(made.uri, quick=True).ok
        path.write_bytes(whole)


def test_a_damaged_chunk_is_named_with_its_bytes(run):
    import numpy as np

    state = {"model.big": np.zeros(2 * CHUNK + 1000, dtype=np.uint8)}
    made = making.checkpoint(run, 5, state=state)
    report = ckpt.verify(made)
    assert report.ok and report.nbytes == made.manifest.nbytes and report.seconds > 0
    making.flip(run.store.path(f"{made.attempt}/{shard_name(0)}"), CHUNK + 5)
    problems = ckpt.verify(made).problems
    assert problems == [
        f"{made.attempt}/{shard_name(0)}: chunk 1 (bytes {CHUNK} to {2 * CHUNK}) doesn't have the digest "
        f"that its manifest says"
    ]


def test_all_that_is_wrong_is_reported_of_every_rank(run):
    made = making.checkpoint(run, 5, world_size=3)
    making.flip(run.store.path(f"{made.attempt}/{shard_name(0)}"))
    making.flip(run.store.path(f"{made.attempt}/{shard_name(2)}"))
    assert [shard_name(0) in p or shard_name(2) in p for p in ckpt.verify(made).problems] == [True, True]
    run.store.delete(f"{made.attempt}/{shard_name(0)}")
    os.truncate(run.store.path(f"{made.attempt}/{shard_name(1)}"), 3)
    problems = ckpt.verify(made, quick=True).problems
    assert len(problems) == 2 and "missing" in problems[0] and "3 bytes" in problems[1]


def test_a_header_that_tells_otherwise_than_the_manifest_is_found(run):
    made = making.checkpoint(run, 5)
    path = run.store.path(f"{made.attempt}/{shard_name(0)}")
    path.write_bytes(path.read_bytes().replace(b"model.weight", b"model.weighs"))
    data = making.file_facts(shard_name(0), path.read_bytes())
    manifest = run.store.path(f"{made.attempt}/{MANIFEST}")
    manifest.write_bytes(making.resealed(manifest.read_bytes(), lambda body: body.update(files=[data])))
    problems = ckpt.verify(made.uri).problems
    assert len(problems) == 1 and "disagree on 'model.weig" in problems[0]


def test_what_is_no_checkpoint_is_refused_and_what_is_not_committed_is_reported(run):
    attempt = making.write_attempt(run, 5)
    report = ckpt.verify(f"{run.uri}/{attempt}")
    assert not report.ok and "is not committed" in report.problems[0]
    with pytest.raises(NotCommitted, match="ckpt ls"):
        ckpt.verify(run.uri)
    with pytest.raises(NotCommitted, match="there is no checkpoint"):
        ckpt.verify(f"{run.uri}/step-000000099-00001-abcd")
    with pytest.raises(StorageError):
        ckpt.verify("s3://bucket/run/step-000000099-00001-abcd")


def test_verifying_changes_nothing_and_works_on_what_may_only_be_read(run):
    made = making.checkpoint(run, 5)
    folder = run.store.path(made.attempt)
    before = making.tree_digest(run.store.path(""))
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert ckpt.verify(made.uri).ok
    finally:
        folder.chmod(0o755)
    assert making.tree_digest(run.store.path("")) == before


def test_a_checkpoint_alone_without_its_run_can_be_verified(run, tmp_path):
    made = making.checkpoint(run, 5)
    os.rename(run.store.path(made.attempt), tmp_path / made.attempt)
    assert ckpt.verify(tmp_path / made.attempt).ok


def test_a_long_list_of_problems_is_cut(run, monkeypatch):
    monkeypatch.setattr("ckpt.verification._MAX_NAMED", 2)
    made = making.checkpoint(run, 5, world_size=5)
    for rank in range(5):
        run.store.delete(f"{made.attempt}/{shard_name(rank)}")
    assert ckpt.verify(made).problems[2:] == ["and 3 more"]
