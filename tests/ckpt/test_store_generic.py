import threading

import pytest

from ckpt.errors import Corrupt, StorageError
from ckpt.launches import begin_launch
from ckpt.run import open_run
from ckpt.store import open_store
from ckpt.stores import generic


@pytest.fixture
def store(request):
    name = request.node.name.replace("[", "-").replace("]", "")
    return open_store(f"memory://{name}/run")


def test_what_is_put_is_read_listed_and_deleted(store):
    store.put("launches/x.json", b"0123456789")
    assert store.read("launches/x.json", 10) == b"0123456789" and store.size("launches/x.json") == 10
    into = bytearray(4)
    store.read_into("launches/x.json", 3, memoryview(into))
    assert into == b"3456"
    assert store.list() == [("launches", True, 0)] and store.list("launches") == [("x.json", False, 10)]
    with pytest.raises(Corrupt, match="at most 9"):
        store.read("launches/x.json", 9)
    with pytest.raises(Corrupt, match="ends at byte 10"):
        store.read_into("launches/x.json", 8, memoryview(into))
    store.delete_tree("launches")
    assert store.list("launches") == [] and store.size("launches/x.json") is None
    store.delete("launches/x.json")
    with pytest.raises(FileNotFoundError):
        store.read("launches/x.json")


@pytest.mark.parametrize("honoured", [True, False])
def test_a_create_is_exclusive_whether_or_not_the_library_knows_how(store, monkeypatch, honoured):
    monkeypatch.setattr(generic, "_exclusive", {} if honoured else {"memory": False})
    monkeypatch.setattr(generic, "_SETTLE_S", 0)
    assert store.create("a", b"first") and not store.create("a", b"second")
    assert store.read("a") == b"first"
    assert [entry.name for entry in store.list()] == ["a"]


def test_a_sink_takes_blocks_in_any_order_and_only_a_finished_one_is_there(store):
    sink = store.open_sink("a", 10, direct=True, say=print)
    threads = [
        threading.Thread(target=sink.write, args=(memoryview(b"01234567890000")[start : start + 4], start))
        for start in (8, 4, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    sink.finish()
    sink.close()
    source = store.open_source("a", direct=True)
    into = bytearray(10)
    source.read_into(0, memoryview(into))
    assert source.size == 10 and into == b"0123456789"
    left = store.open_sink("b", 10, direct=True, say=print)
    left.write(memoryview(b"0123"), 0)
    left.close()
    assert store.size("b") is None


def test_storage_that_only_one_process_sees_takes_no_launch(store):
    run = open_run(store.uri)
    assert open_run(store.uri, create=False).id == run.id
    with pytest.raises(StorageError, match="only this process"):
        begin_launch(run, owner="", config=None, say=print)


def test_a_library_that_is_not_there_is_named():
    pytest.importorskip("fsspec")
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        with pytest.raises(StorageError, match="gcsfs"):
            open_store("gs://bucket/run")
