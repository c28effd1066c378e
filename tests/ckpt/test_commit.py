import errno
import json
import os
import subprocess
import sys
import threading

import pytest

import ckpt
from ckpt import exclusive, faults
from ckpt.commit import commit, posthumous, uncommitted
from ckpt.errors import Corrupt, Fenced, NotCommitted, StorageError
from ckpt.names import MANIFEST, part_name, shard_name
from ckpt.run import open_run
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    run = making.run_at(tmp_path / "run")
    making.launch(run, 1)
    return run


def commit_it(run, attempt, world_size=1, launch=1, key=None):
    return commit(run.store, attempt, world_size, launch, run.id, key)


def test_an_attempt_is_a_checkpoint_from_its_manifest_on_and_not_before(run):
    attempt = making.write_attempt(run, 10, world_size=2)
    assert ckpt.checkpoints(run.uri) == [] and ckpt.latest_valid(run.uri) is None
    made = commit_it(run, attempt, 2)
    assert [item.attempt for item in ckpt.checkpoints(run.uri)] == [attempt]
    assert ckpt.latest_valid(run.uri) == made and made.step == 10 and made.manifest.world_size == 2


@pytest.mark.parametrize("missing", [part_name(0), part_name(1), shard_name(1)])
def test_nothing_is_committed_before_every_rank_is_durable(run, missing):
    attempt = making.write_attempt(run, 10, world_size=2)
    run.store.delete(f"{attempt}/{missing}")
    with pytest.raises(NotCommitted, match="10-00001-"):
        commit_it(run, attempt, 2)
    assert run.store.size(f"{attempt}/{MANIFEST}") is None


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_than_its_rank_wrote_is_not_committed(run, change):
    attempt = making.write_attempt(run, 10)
    path = run.store.path(f"{attempt}/{shard_name(0)}")
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(Corrupt, match="bytes, where its rank wrote"):
        commit_it(run, attempt)
    assert ckpt.latest_valid(run.uri) is None


def test_a_part_put_in_the_wrong_place_is_not_committed(run, tmp_path):
    attempt = making.write_attempt(run, 10)
    other = making.write_attempt(run, 20)
    part = run.store.read(f"{other}/{part_name(0)}")
    run.store.put(f"{attempt}/{part_name(0)}", part)
    with pytest.raises(Corrupt, match="attempt"):
        commit_it(run, attempt)
    stranger = making.run_at(tmp_path / "other")
    foreign = making.write_attempt(stranger, 10, attempt=other)
    run.store.put(f"{other}/{part_name(0)}", stranger.store.read(f"{foreign}/{part_name(0)}"))
    with pytest.raises(Corrupt, match="run_id"):
        commit_it(run, other)


def test_a_world_size_other_than_the_parts_say_is_not_committed(run):
    attempt = making.write_attempt(run, 10, world_size=2)
    with pytest.raises(Corrupt, match="world_size"):
        commit_it(run, attempt, 1)


def test_an_overtaken_launch_can_not_commit(run):
    attempt = making.write_attempt(run, 10)
    making.launch(run, 2)
    with pytest.raises(Fenced, match="launch 1 has been overtaken by launch 2"):
        commit_it(run, attempt)
    assert run.store.size(f"{attempt}/{MANIFEST}") is None
    assert commit_it(run, attempt, launch=2).step == 10


def test_committing_again_is_no_error_and_changes_nothing(run):
    attempt = making.write_attempt(run, 10)
    commit_it(run, attempt)
    before = making.tree_digest(run.store.path(""))
    commit_it(run, attempt)
    assert making.tree_digest(run.store.path("")) == before


def test_many_committers_at_once_make_one_checkpoint(run):
    attempt = making.write_attempt(run, 10, world_size=2)
    outcomes, barrier = [], threading.Barrier(6)

    def work():
        barrier.wait(10)
        outcomes.append(commit_it(run, attempt, 2).manifest.raw)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 6 and len(set(outcomes)) == 1


def test_a_manifest_that_is_not_that_of_what_lies_beside_it_is_never_replaced(run):
    attempt = making.write_attempt(run, 10)
    run.store.put(f"{attempt}/{MANIFEST}", b'{"other":1}')
    with pytest.raises(Corrupt, match="is not the manifest of what lies beside it"):
        commit_it(run, attempt)
    assert run.store.read(f"{attempt}/{MANIFEST}") == b'{"other":1}'


def test_a_torn_manifest_is_no_checkpoint_and_the_next_opener_completes_it(run):
    attempt = making.write_attempt(run, 10)
    whole = commit_it(run, attempt).manifest.raw
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        os.truncate(run.store.path(f"{attempt}/{MANIFEST}"), size)
        with pytest.raises(Corrupt, match="no checkpoint of"):
            ckpt.latest_valid(run.uri)
        assert posthumous(run, 2) == [attempt]
        assert run.store.read(f"{attempt}/{MANIFEST}") == whole


COMMIT = """
import sys
from ckpt.commit import commit
from ckpt.run import open_run
run = open_run(sys.argv[1])
commit(run.store, sys.argv[2], 2, 1, run.id)
"""


@pytest.mark.parametrize("where", ["create", "write", "fsync", "link", "fsync_dir"])
def test_a_committer_killed_at_any_point_leaves_a_checkpoint_or_none_and_the_next_opener_has_it(run, where):
    attempt = making.write_attempt(run, 10, world_size=2)
    rules = [{"match": f":{where}:.*{attempt}", "do": "kill"}]
    ended = subprocess.run(
        [sys.executable, "-c", COMMIT, run.uri, attempt],
        env={**os.environ, "CKPT_FAULTS": json.dumps(rules)},
        timeout=60,
    )
    assert ended.returncode == -9
    before = ckpt.latest_valid(run.uri)
    assert before is None if where != "fsync_dir" else before.attempt == attempt
    assert posthumous(run, 2) == ([attempt] if before is None else [])
    assert ckpt.latest_valid(run.uri).attempt == attempt and ckpt.verify(ckpt.latest_valid(run.uri)).ok
    assert posthumous(run, 2) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_commit_that_fails_in_storage_says_so_and_can_be_done_again(run, monkeypatch, code):
    attempt = making.write_attempt(run, 10)
    monkeypatch.setattr(
        faults, "_rules", faults.parse(json.dumps([{"match": "fsync.*", "do": "raise", "errno": code}]))
    )
    with pytest.raises(StorageError) as caught:
        commit_it(run, attempt)
    assert caught.value.__cause__.errno == code
    monkeypatch.setattr(faults, "_rules", [])
    assert ckpt.latest_valid(run.uri) is None
    assert commit_it(run, attempt).step == 10


def test_without_links_or_renames_a_commit_still_never_overwrites(run, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(exclusive, "_rename_no_replace", refuse)
    attempt = making.write_attempt(run, 10)
    assert commit_it(run, attempt).step == 10
    assert commit_it(run, attempt).step == 10
    assert ckpt.verify(ckpt.latest_valid(run.uri)).ok


def test_posthumous_commits_only_what_is_whole_and_of_older_launches(run):
    whole = making.write_attempt(run, 10, 1, world_size=2)
    no_part = making.write_attempt(run, 11, 1, world_size=2)
    run.store.delete(f"{no_part}/{part_name(1)}")
    cut = making.write_attempt(run, 12, 1)
    os.truncate(run.store.path(f"{cut}/{shard_name(0)}"), 5000 - 904)
    making.write_attempt(run, 13, 1, parts=False)
    being_deleted = making.write_attempt(run, 14, 1)
    run.store.put(f"{being_deleted}/doomed.json", b"{}")
    damaged = making.write_attempt(run, 16, 1)
    making.flip(run.store.path(f"{damaged}/{part_name(0)}"), 100)
    own = making.write_attempt(run, 15, 2)
    making.launch(run, 2, outcome=None)
    said = []
    assert posthumous(run, 2, say=said.append) == [whole]
    assert any(cut in text for text in said)
    assert own not in uncommitted(run.store, 2) and whole not in uncommitted(run.store, 2)


def test_posthumous_commits_stop_when_overtaken(run):
    making.write_attempt(run, 10, 1)
    making.launch(run, 3)
    with pytest.raises(Fenced):
        posthumous(run, 2)


def test_with_a_key_only_signed_parts_are_committed(run, monkeypatch):
    unsigned = making.write_attempt(run, 10)
    monkeypatch.setenv("CKPT_SIGNING_KEY", "secret")
    run = open_run(run.uri)
    assert posthumous(run, 2) == []
    with pytest.raises(Corrupt, match="not signed"):
        commit_it(run, unsigned, key=run.signing_key)
    signed = making.write_attempt(run, 20)
    assert posthumous(run, 2) == [signed]
    assert ckpt.latest_valid(run.uri).attempt == signed
    monkeypatch.setenv("CKPT_SIGNING_KEY", "another")
    with pytest.raises(Corrupt, match="no checkpoint of"):
        ckpt.latest_valid(run.uri)
