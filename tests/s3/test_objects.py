"""The store interface over a real S3 server."""

import threading

import pytest

from ckpt.errors import Corrupt, StorageError
from ckpt.store import open_store

ODD = ["a b", "ünïcødé", "[x]", "epoch=3", "~tilde", "100%", "a%20b", "a,b{c}", "it's", "#?&+"]


@pytest.fixture
def store(s3_env, s3_root):
    return open_store(f"{s3_root}/run")


def test_what_is_put_is_read_whole_in_part_and_by_size(store):
    store.put("launches/x.json", b"0123456789")
    assert store.read("launches/x.json") == b"0123456789"
    assert store.size("launches/x.json") == 10
    into = bytearray(4)
    store.read_into("launches/x.json", 3, memoryview(into))
    assert into == b"3456"
    store.put("launches/x.json", b"")
    assert store.read("launches/x.json") == b"" and store.size("launches/x.json") == 0


def test_reading_what_is_not_there_is_told_apart_from_failing(store):
    for read in (store.read, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
        with pytest.raises(FileNotFoundError):
            read("a")
    assert store.size("a") is None and store.list("a") == [] and store.list() == []


def test_reads_are_bounded(store):
    store.put("a", b"x" * 100)
    assert store.read("a", 100) == b"x" * 100
    with pytest.raises(Corrupt, match="at most 99"):
        store.read("a", 99)
    for start in (91, 100, 5000):
        with pytest.raises(Corrupt, match="ends at byte 100"):
            store.read_into("a", start, memoryview(bytearray(10)))


def test_a_create_is_exclusive_among_many_at_once(store):
    won = []

    def contend(me):
        won.extend(n for n in range(8) if store.create(f"{n}.json", str(me).encode()))

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(8))
    assert sorted(entry.name for entry in store.list()) == [f"{n}.json" for n in range(8)]


def test_a_listing_shows_what_is_directly_below_a_prefix_and_nothing_else(s3_env, s3_root):
    store = open_store(f"{s3_root}/exp-1")
    open_store(f"{s3_root}/exp-10").put("other", b"1")
    store.put("a", b"12")
    store.put("d/e/f", b"3")
    assert sorted(store.list()) == [("a", False, 2), ("d", True, 0)]
    assert store.list("d") == [("e", True, 0)]
    store.delete_tree("d")
    assert store.list("d") == [] and store.read("a") == b"12"
    assert [entry.name for entry in open_store(s3_root).list()] == ["exp-1", "exp-10"]


def test_a_tree_of_more_than_a_page_is_listed_and_deleted_whole(store):
    keys = [f"t/{n:04d}" for n in range(1005)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert len(store.list("t")) == 1005
    store.put("tt", b"1")
    store.delete_tree("t")
    assert store.list("t") == [] and store.size("tt") == 1
    store.delete("tt")
    store.delete("tt")
    assert store.size("tt") is None


@pytest.mark.parametrize("name", ODD)
def test_addresses_with_legal_but_odd_characters_work(s3_env, s3_root, name):
    store = open_store(f"{s3_root}/{name}")
    assert store.create("x.json", b"1")
    again = open_store(store.uri)
    assert again.uri == store.uri and again.read("x.json") == b"1"
    assert [entry.name for entry in open_store(s3_root).list()] == [name]


def test_a_wrong_bucket_key_or_endpoint_is_one_clear_error(s3_env, s3_root, monkeypatch):
    with pytest.raises(StorageError, match="there is no bucket no-such-bucket at http"):
        open_store("s3://no-such-bucket/run").read("run.json")
    store = f"{s3_root}/run"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong" * 8)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    with pytest.raises(StorageError) as caught:
        open_store(store).read("run.json")
    assert "doesn't belong" in str(caught.value) and "wrongwrong" not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StorageError, match="doesn't know the access key from AWS_ACCESS_KEY_ID"):
        open_store(store).read("run.json")
