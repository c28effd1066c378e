"""Copies of runs and checkpoints: whole and checked, or not taken for checkpoints."""

import json
import os
import shutil

import pytest

from ckpt import cli, copying, faults
from ckpt.copying import copy
from ckpt.digest import CHUNK
from ckpt.discover import candidates, committed, latest_valid
from ckpt.errors import NotCommitted, StateError
from ckpt.names import MANIFEST, RUN_FILE, shard_name
from ckpt.pins import pin, pins
from ckpt.run import open_run
from ckpt.store import open_store
from ckpt.verification import verify
from tests.ckpt import making

BIG = CHUNK // 12 + 1000  # rows: a shard of a chunk and a bit


@pytest.fixture
def run(tmp_path):
    """Two launches with three checkpoints, one abandoned, and an attempt that never became one."""
    run = making.run_at(tmp_path / "a b" / "run")
    making.launch(run, 1, fresh=True)
    first = making.checkpoint(run, 10, world_size=2)
    making.checkpoint(run, 20)
    making.launch(run, 2, parent=first)
    making.checkpoint(run, 15, 2)
    making.write_attempt(run, 17, 2)
    run.store.put("launches/00002.beat", b"{}")
    run.store.make_dir("logs/00001")
    run.store.put("logs/00001/rank-00000.log", b"one\n")
    pin(run, "keeper", first)
    return run


@pytest.fixture(params=["folder", "memory"])
def dest(request, tmp_path):
    return str(tmp_path / "copy") if request.param == "folder" else f"memory://copies/{tmp_path.name}"


def names_in(uri):
    return [item.attempt for item in committed(open_run(uri, create=False))]


def test_the_copy_of_a_run_is_the_run(run, dest):
    done = copy(run.uri, dest)
    assert done.ok and len(done.copied) == 3 and not done.present
    assert names_in(dest) == names_in(run.uri) == done.copied
    there = open_run(dest, create=False)
    assert there.id == run.id
    assert [item.abandoned for item in committed(there)] == [False, False, True]
    assert all(verify(item).ok for item in committed(there))
    assert [tag.name for tag in pins(there)] == ["keeper"]
    assert there.store.read("logs/00001/rank-00000.log") == b"one\n"
    assert there.store.size("launches/00002.beat") is None
    assert done.nbytes == sum(item.manifest.nbytes for item in committed(run))


def test_it_goes_on_where_it_stopped_and_repairs_what_does_not_verify(run, dest, monkeypatch):
    copy(run.uri, dest)
    store = open_store(dest)
    newest, middle, _ = names_in(dest)
    store.delete(f"{newest}/{MANIFEST}")
    shard = f"{middle}/{shard_name(0)}"
    store.put(shard, bytes(store.size(shard)))
    assert not verify(f"{dest}/{middle}").ok
    again = copy(run.uri, dest)
    assert again.copied == [newest, middle] and len(again.present) == 1
    assert again.nbytes == store.size(shard), "only the damaged shard is copied again"
    assert all(verify(item).ok for item in committed(open_run(dest)))
    assert len(copy(run.uri, dest).present) == 3


def test_what_grew_since_is_copied_and_what_is_another_run_is_refused(run, dest, tmp_path):
    copy(run.uri, dest)
    run.store.put("logs/00001/rank-00000.log", b"one\ntwo\n")
    newest = making.checkpoint(run, 30, 2)
    assert copy(run.uri, dest).copied == [newest.attempt]
    assert open_store(dest).read("logs/00001/rank-00000.log") == b"one\ntwo\n"
    other = making.run_at(tmp_path / "other")
    making.checkpoint(other, 1)
    before = names_in(dest)
    with pytest.raises(StateError, match="another run"):
        copy(other.uri, dest)
    assert names_in(dest) == before


def test_what_is_no_run_is_not_copied_over(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    with pytest.raises(StateError, match=r"thesis\.tex"):
        copy(run.uri, str(tmp_path / "mine"))
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_another_file_of_the_same_name_stays(run, dest):
    copy(run.uri, dest)
    store = open_store(dest)
    store.put("launches/00001.json", b"something else")
    with pytest.raises(StateError, match=r"launches/00001\.json"):
        copy(run.uri, dest)
    assert store.read("launches/00001.json") == b"something else"


def test_one_checkpoint_goes_into_a_run_of_its_own(run, dest):
    first = committed(run)[1]
    done = copy(first.uri, dest)
    assert done.copied == [first.attempt] == names_in(dest)
    assert verify(f"{dest}/{first.attempt}").ok
    assert copy(first.uri, f"{dest}/{first.attempt}").present == [first.attempt]
    with pytest.raises(StateError, match="keeps its name"):
        copy(committed(run)[0].uri, f"{dest}/{first.attempt}")


def test_what_is_not_committed_is_not_copied(run, dest):
    attempt = next(e.name for e in run.store.list() if e.name.startswith("step-000000017"))
    with pytest.raises(NotCommitted):
        copy(f"{run.uri}/{attempt}", dest)
    with pytest.raises(NotCommitted):
        copy(f"{run.uri}-that-is-not-there", dest)
    assert open_store(dest).list() == []


def test_a_damaged_checkpoint_gets_no_manifest_in_the_copy_and_the_others_do(run, dest):
    newest = committed(run)[0]
    making.flip(run.store.path(f"{newest.attempt}/{shard_name(0)}"))
    done = copy(run.uri, dest)
    assert not done.ok and newest.attempt in done.problems[0] and "damaged" in done.problems[0]
    assert names_in(dest) == [item.attempt for item in committed(run)[1:]]
    assert open_store(dest).size(f"{newest.attempt}/{MANIFEST}") is None


def test_large_shards_arrive_whole(tmp_path, dest):
    run = making.run_at(tmp_path / "big")
    made = making.checkpoint(run, 1, state=making.tensors(1, rows=BIG))
    assert made.manifest.files[0].size > CHUNK
    assert copy(run.uri, dest).nbytes == made.manifest.nbytes
    assert verify(f"{dest}/{made.attempt}").ok


def test_a_damaged_chunk_ends_the_copy_of_its_shard_and_nobody_waits_for_it(tmp_path, dest):
    run = making.run_at(tmp_path / "big")
    made = making.checkpoint(run, 1, state=making.tensors(1, rows=BIG))
    making.flip(run.store.path(f"{made.attempt}/{shard_name(0)}"), 9000)
    assert "chunk 0" in copy(run.uri, dest).problems[0]
    assert open_store(dest).size(f"{made.attempt}/{MANIFEST}") is None


def test_a_copy_killed_at_any_point_is_never_taken_for_whole(run, tmp_path, monkeypatch):
    """Each operation on storage fails once: what is committed in the copy verifies, and a second try ends."""
    for nth in range(1, 200, 5):
        dest = str(tmp_path / "copies" / str(nth))
        rule = {"match": f"trainer:(create|put|pwrite|fsync|link|open|mkdir):.*/copies/{nth}/", "nth": nth}
        monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps([{**rule, "do": "raise"}])))
        monkeypatch.setattr(copying, "retrying", lambda work, *_: work())
        struck = None
        try:
            struck = not copy(run.uri, dest).ok
        except Exception:
            struck = True
        monkeypatch.setattr(faults, "_rules", [])
        if open_store(dest).size(RUN_FILE):
            assert all(verify(item).ok for item in committed(open_run(dest, create=False)))
        assert copy(run.uri, dest).ok
        assert names_in(dest) == names_in(run.uri)
        if not struck:
            return
        shutil.rmtree(dest)
    pytest.fail("there was no end to the operations")


def test_places_inside_each_other_are_refused(run):
    for dest in (run.uri, f"{run.uri}/copy", str(run.store.path("").parent)):
        with pytest.raises(StateError, match="apart"):
            copy(run.uri, dest)


def test_a_plain_recursive_copy_is_the_run_as_well(run, tmp_path):
    shutil.copytree(run.store.path(""), tmp_path / "plain")
    there = open_run(str(tmp_path / "plain"), create=False)
    assert there.id == run.id and names_in(there.uri) == names_in(run.uri)
    assert latest_valid(there.uri).attempt == latest_valid(run.uri).attempt
    assert [item.attempt for item in candidates(there)] == [item.attempt for item in candidates(run)]


def test_the_command_says_what_it_did(run, tmp_path, capsys):
    dest = str(tmp_path / "copy")
    assert cli.main(["cp", run.uri, dest, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and len(data["copied"]) == 3 and data["dest"] == dest
    assert cli.main(["cp", run.uri, dest]) == 0
    assert "0 copied, 3 there already" in capsys.readouterr().out
    making.flip(run.store.path(f"{names_in(run.uri)[0]}/{shard_name(0)}"))
    shutil.rmtree(dest)
    assert cli.main(["cp", run.uri, dest]) == 1
    assert "NOT copied" in capsys.readouterr().out
    assert cli.main(["cp", run.uri, run.uri]) == 2
    assert cli.main(["cp", str(tmp_path / "nowhere"), dest]) == 2
