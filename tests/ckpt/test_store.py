import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import exclusive, faults
from ckpt.errors import Corrupt, StorageError
from ckpt.store import open_store
from ckpt.stores.addresses import folder_of

ODD = ["a b", "ünïcødé", "[x]", "epoch=3", "~tilde", "100%", "a,b{c}", "it's", "#?&"]


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def rules(monkeypatch, *items):
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(items)))


@pytest.mark.parametrize("name", ODD)
def test_paths_with_legal_but_odd_characters_work(tmp_path, name):
    store = open_store(f"{tmp_path}/{name}/run")
    store.make_dir("")
    assert store.create("x.json", b"1")
    assert (tmp_path / name / "run" / "x.json").read_bytes() == b"1"
    again = open_store(store.uri)
    assert again.uri == store.uri and again.read("x.json") == b"1"
    assert open_store((tmp_path / name / "run").as_uri()).uri == store.uri


def test_addresses_that_mean_the_same_folder_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "runs" / "a")
    for uri in [
        "runs/a",
        "./runs/a",
        "runs//a/",
        "~/runs/a",
        expected,
        f"file://{expected}",
        f"file://localhost{expected}",
    ]:
        assert open_store(uri).uri == expected


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("", "folder"),
        ("  ", "folder"),
        ("file:/a/b", "three slashes"),
        ("file://a/b", "three slashes"),
        ("file:a", "three slashes"),
        ("s3:/bucket/run", "s3://bucket/run meant"),
        ("http://host/run", "not supported"),
        ("~nobody-of-this-name/run", "no such user"),
        ("a\0b", "NUL"),
    ],
)
def test_mistyped_addresses_are_refused_with_advice(uri, advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=advice):
        open_store(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_link_followed_by_dotdot_is_resolved_as_the_system_does(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    assert folder_of(f"{tmp_path}/link/../x") == tmp_path / "real" / "x"


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\0b", "."])
def test_a_key_never_leaves_the_run(store, key):
    for operation in (store.read, store.size, store.delete, store.delete_tree, store.path):
        with pytest.raises(StorageError, match="not a name inside"):
            operation(key)


def _contend(root, count, barrier, queue):
    store = open_store(root)
    me = str(os.getpid()).encode()
    barrier.wait(30)
    queue.put([n for n in range(count) if store.create(f"{n}.json", me)])


def test_of_many_processes_that_create_the_same_key_exactly_one_wins(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_contend, args=(str(tmp_path), 60, barrier, queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    won = sorted(n for _ in workers for n in queue.get(timeout=60))
    for worker in workers:
        worker.join(30)
    assert won == list(range(60))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]


def _refuse_link(*_, **__):
    raise OSError(errno.EPERM, "no links here")


def _refuse_rename(*_):
    raise OSError(errno.EINVAL, "no such flag here")


@pytest.mark.parametrize("level", ["link", "rename", "plain"])
def test_every_way_of_creating_is_exclusive(store, monkeypatch, level):
    if level != "link":
        monkeypatch.setattr(os, "link", _refuse_link)
    if level == "plain":
        monkeypatch.setattr(exclusive, "_rename_no_replace", _refuse_rename)
    assert store.create("a", b"first")
    assert not store.create("a", b"second")
    assert store.read("a") == b"first"
    assert [entry.name for entry in store.list()] == ["a"]
    assert [path.name for path in store.path("").iterdir()] == ["a"]


def test_a_link_whose_success_was_reported_as_a_clash_counts_as_made(store, monkeypatch):
    real = os.link

    def link_then_lose_the_answer(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "the retry found the name taken")

    monkeypatch.setattr(os, "link", link_then_lose_the_answer)
    assert store.create("a", b"mine")
    assert store.read("a") == b"mine"


@pytest.mark.parametrize("level", ["link", "rename", "plain"])
def test_what_is_created_is_synced_before_it_has_its_name_and_so_is_its_folder_after(
    store, monkeypatch, level
):
    done = []
    real_sync, real_link = os.fsync, os.link

    def note_sync(fd):
        done.append("folder" if Path(f"/proc/self/fd/{fd}").resolve().is_dir() else "file")
        real_sync(fd)

    def note_link(source, target):
        if level != "link":
            raise OSError(errno.ENOTSUP, "no links")
        done.append("name")
        real_link(source, target)

    real_rename = exclusive._rename_no_replace

    def note_rename(source, target):
        if level != "rename":
            raise OSError(errno.EINVAL, "no such flag")
        done.append("name")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    monkeypatch.setattr(exclusive, "_rename_no_replace", note_rename)
    assert store.create("a", b"x")
    assert done == {"plain": ["file", "file", "folder"]}.get(level, ["file", "name", "folder"])


def test_a_durable_put_syncs_and_one_that_need_not_be_does_not(store, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store.put("a", b"1")
    assert len(synced) == 2
    store.put("a", b"2", durable=False)
    assert len(synced) == 2 and store.read("a") == b"2"


def test_a_folder_that_is_gone_is_not_made_anew_for_what_belongs_into_it(tmp_path):
    store = open_store(tmp_path / "runs" / "a")
    with pytest.raises(StorageError, match="is gone"):
        store.make_dir("launches")
    assert list(tmp_path.iterdir()) == []


def test_made_folders_are_synced_up_to_the_first_that_was_there(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(exclusive, "sync_folder", synced.append)
    store = open_store(tmp_path / "runs" / "a")
    store.make_dir("")
    store.make_dir("launches")
    assert synced == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"]
    store.make_dir("launches")
    assert len(synced) == 3


@pytest.mark.parametrize("where", ["write", "fsync", "link"])
def test_a_create_that_is_killed_leaves_no_such_key(tmp_path, where):
    rule = [{"match": f":{where}:.*x.json", "do": "kill"}]
    code = f"from ckpt.store import open_store; open_store({str(tmp_path)!r}).create('x.json', b'1' * 1000)"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CKPT_FAULTS": json.dumps(rule)}, timeout=60
    )
    assert ended.returncode == -9
    store = open_store(tmp_path)
    assert store.size("x.json") is None and store.list() == []
    assert store.create("x.json", b"2")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_storage_errors_say_what_failed_and_keep_their_cause(store, monkeypatch, code):
    rules(monkeypatch, {"match": "write", "do": "raise", "errno": code})
    with pytest.raises(StorageError, match=r"can't create .*a\.json: .*\(") as caught:
        store.create("a.json", b"1")
    assert caught.value.__cause__.errno == code
    assert list(store.path("").iterdir()) == []


def test_reading_what_is_not_there_is_told_apart_from_failing(store, monkeypatch):
    with pytest.raises(FileNotFoundError):
        store.read("a")
    assert store.size("a") is None and store.list("a") == []
    rules(monkeypatch, {"match": "read|list|size", "do": "raise", "errno": errno.EIO})
    for operation in (store.read, store.size, store.list):
        with pytest.raises(StorageError):
            operation("a")


def test_a_stale_handle_is_looked_up_again(store, monkeypatch):
    store.put("a", b"1")
    real, failures = os.open, [1, 1]

    def stale_at_first(path, *args, **kwargs):
        if failures:
            failures.pop()
            raise OSError(errno.ESTALE, "stale")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", stale_at_first)
    assert store.read("a") == b"1"


def test_reads_are_bounded(store):
    store.put("a", b"x" * 100)
    assert store.read("a", 100) == b"x" * 100
    with pytest.raises(Corrupt, match="at most 99"):
        store.read("a", 99)
    into = bytearray(10)
    store.read_into("a", 90, memoryview(into))
    assert into == b"x" * 10
    with pytest.raises(Corrupt, match="ends at byte 100"):
        store.read_into("a", 91, memoryview(into))


def test_a_pipe_or_a_folder_in_a_files_place_is_refused_at_once(store):
    os.mkfifo(store.path("pipe"))
    store.make_dir("folder")
    for key in ("pipe", "folder"):
        with pytest.raises((Corrupt, StorageError)):
            store.read(key)
        assert store.size(key) is None


def test_listing_shows_one_level_no_temporary_files_and_no_folders_beyond_links(store, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    store.make_dir("folder/inner")
    store.put("file", b"123")
    store.path(".tmp-0123").write_bytes(b"")
    store.path("link").symlink_to(outside)
    assert sorted(entry for entry in store.list() if entry.name != "link") == [
        ("file", False, 3),
        ("folder", True, 0),
    ]
    assert not next(entry for entry in store.list() if entry.name == "link").is_dir


def test_deleting_is_idempotent_and_never_follows_links(store, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious").write_bytes(b"1")
    store.make_dir("folder")
    store.path("folder/link").symlink_to(outside)
    store.path("link").symlink_to(outside)
    for _ in range(2):
        store.delete_tree("folder")
        store.delete_tree("link")
        store.delete("gone")
    assert (outside / "precious").read_bytes() == b"1" and store.list() == []
    with pytest.raises(StorageError, match="refusing"):
        store.delete_tree("")


def test_a_failed_deletion_is_reported_after_all_else_is_gone(store, monkeypatch):
    store.make_dir("folder")
    for name in "abc":
        store.put(f"folder/{name}", b"1")
    real = os.unlink

    def refuse_b(path, **kwargs):
        if os.fspath(path) == "b":
            raise PermissionError(errno.EACCES, "no")
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse_b)
    with pytest.raises(StorageError, match="permissions"):
        store.delete_tree("folder")
    assert [entry.name for entry in store.list("folder")] == ["b"]
