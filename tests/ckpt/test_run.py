import json
import subprocess
import sys
import threading

import pytest

import ckpt
from ckpt.errors import Corrupt, NewerFormat, NotCommitted, StateError, StorageError
from ckpt.run import open_run
from tests.ckpt import making

ODD = ["a b", "ünïcødé", "[x]", "epoch=3", "~tilde", "100%"]


@pytest.mark.parametrize("name", ODD)
def test_i3_a_run_may_lie_at_any_legal_path(tmp_path, name):
    run = open_run(f"{tmp_path}/{name}/run {name}", info={"project": "p"})
    made = making.checkpoint(run, 5)
    assert [item.uri for item in ckpt.checkpoints(run.uri)] == [made.uri]
    assert ckpt.latest_valid(run.uri).uri == made.uri == f"{tmp_path}/{name}/run {name}/{made.attempt}"
    assert ckpt.verify(made.uri).ok


def test_i3_no_name_that_is_written_needs_quoting(tmp_path):
    run = making.run_at(tmp_path / "r")
    made = making.checkpoint(run, 5, world_size=2)
    making.launch(run, 1, fresh=True)
    from ckpt.pins import pin

    pin(run, "best.v1", made)
    for path in (tmp_path / "r").rglob("*"):
        assert not set(path.name) & set("=,{}[]: '\"\\$~")


def test_opening_makes_a_run_once_and_finds_it_again(tmp_path):
    made = open_run(tmp_path / "runs" / "a", info={"project": "p", "seed": 3})
    again = open_run(f"file://{tmp_path}/runs/a", info={"project": "other"})
    assert again.id == made.id and again.info == made.info and again.info["project"] == "p"
    assert again.name == "a" and again.uri == str(tmp_path / "runs" / "a")
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["run.json"]


def test_many_openers_at_once_agree_on_one_run(tmp_path):
    ids, barrier = [], threading.Barrier(8)

    def open_it():
        barrier.wait(10)
        ids.append(open_run(tmp_path / "r").id)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ids) == 8 and len(set(ids)) == 1


def test_a_run_that_is_not_there_is_named_with_its_neighbours_and_nothing_is_made(tmp_path):
    open_run(tmp_path / "experiment-1")
    with pytest.raises(NotCommitted, match="experiment-1"):
        open_run(tmp_path / "experiment-2", create=False)
    assert [path.name for path in tmp_path.iterdir()] == ["experiment-1"]


def test_bad_input_is_refused_before_any_folder_is_made(tmp_path, monkeypatch):
    for info, error in [
        ({"f": print}, StateError),
        ({"id": "mine"}, StorageError),
        ({"x": "y" * (2 << 20)}, StorageError),
    ]:
        with pytest.raises(error):
            open_run(tmp_path / "r", info=info)
    monkeypatch.setenv("CKPT_SIGNING_KEY", " ")
    with pytest.raises(StateError):
        open_run(tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_given_for_a_run_is_refused_with_the_run(tmp_path):
    made = making.checkpoint(making.run_at(tmp_path / "r"), 5)
    with pytest.raises(StorageError, match=f"open its run, {tmp_path}/r"):
        open_run(made.uri)


def test_checkpoints_that_lost_their_run_file_are_not_made_into_a_new_run(tmp_path):
    run = making.run_at(tmp_path / "r")
    making.checkpoint(run, 5)
    run.store.delete("run.json")
    with pytest.raises(Corrupt, match=r"no run\.json"):
        open_run(run.uri)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format":1}', b'{"format":1,"id":""}', b'{"format":"1","id":"x"}']
)
def test_a_damaged_run_file_is_refused(tmp_path, data):
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(Corrupt, match=r"run\.json"):
        open_run(tmp_path)


def test_a_run_of_a_newer_format_is_refused_with_advice(tmp_path):
    (tmp_path / "run.json").write_bytes(b'{"format":2,"id":"x"}')
    with pytest.raises(NewerFormat, match="update"):
        open_run(tmp_path)


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file where a folder is needed"):
        open_run(tmp_path / "file" / "run")


def test_the_storage_side_needs_no_torch():
    code = """
import sys, ckpt
for name in ("open_run", "checkpoints", "latest_valid", "verify", "CheckpointError", "KeepLast"):
    getattr(ckpt, name)
import ckpt.retention, ckpt.pins, ckpt.cli, ckpt.launches
print("torch" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "False"


def test_every_public_name_is_there_and_others_are_not():
    for name in ckpt.__all__:
        assert getattr(ckpt, name).__name__ == name
        assert name in dir(ckpt)
    with pytest.raises(AttributeError, match="nonsense"):
        ckpt.nonsense  # noqa: B018
    for name in ("NotCommitted", "Corrupt", "Fenced", "RunBusy", "StateError", "StorageError"):
        assert issubclass(getattr(ckpt, name), ckpt.CheckpointError)
    assert ckpt.CheckpointError.__mro__[1] is Exception


def test_run_json_says_who_the_run_is(tmp_path):
    run = open_run(tmp_path / "r", info={"project": "p"})
    body = json.loads((tmp_path / "r" / "run.json").read_bytes())
    assert body == run.info and body["format"] == 1 and body["id"] == run.id and body["project"] == "p"
    assert body["created"].endswith("+00:00")
