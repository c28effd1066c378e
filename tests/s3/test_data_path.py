"""Shards on their way to a real object store and back, while requests fail, are cut, or change bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time

import obstore
import pytest

from ckpt import copying, reader
from ckpt.copying import copy
from ckpt.digest import CHUNK, DEFAULT, chunk_digest, file_digest
from ckpt.discover import committed, latest_valid
from ckpt.errors import Corrupt, StorageError
from ckpt.launches import begin_launch, record_parent
from ckpt.layout import part_tensors
from ckpt.manifest import FileEntry
from ckpt.names import part_name, shard_name
from ckpt.reader import Want, read_verified
from ckpt.run import open_run
from ckpt.store import open_store
from ckpt.verification import verify
from ckpt.writer.options import WriterOptions
from ckpt.writer.persist import Persister
from ckpt.writer.save import Save, VoidError
from tests.ckpt import making
from tests.ckpt.writing import Arena, attempt_of, fill, layout_of, part_of
from tests.s3.proxy import (
    DENIED,
    EXPIRED,
    FLIP_REPLY,
    FLIP_REQUEST,
    LOST_REPLY,
    RESET,
    RESET_MIDWAY,
    SLOW_DOWN,
    TRUNCATE,
)

RUN_ID = "0" * 32
MIB = 1 << 20
SHARD = r"rank-00000\.safetensors"


@pytest.fixture
def small_parts(proxied_env, monkeypatch):
    """Parts of 5 MiB, the smallest that S3 takes, three at once; requests pass the proxy."""
    monkeypatch.setenv("CKPT_S3_PART_MIB", "5")
    monkeypatch.setenv("CKPT_S3_PARTS_IN_FLIGHT", "3")
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "10")


@pytest.fixture
def saved(small_parts, s3_root):
    """Makes saves of a shard of 17 MiB and an odd tail: four parts, two chunks."""
    made: list[Save] = []

    def make(stage: bool = True) -> Save:
        layout = layout_of(17)
        arena = Arena.create(layout.size)
        tensors = part_tensors([placed.slice for placed in layout.placed], layout)
        save = Save(attempt_of(1), arena, layout.size, tensors)
        if stage:
            arena.watermark = fill(arena, layout, 1)
            save.seal(part_of(RUN_ID, save.attempt))
        made.append(save)
        return save

    yield make
    for save in made:
        save.arena.close()


@pytest.fixture
def persister(small_parts, s3_root):
    return Persister(open_store(s3_root), 0, WriterOptions(retry_s=8), print)


def shard_in(store, save: Save) -> bytes:
    return store.read(f"{save.attempt}/{shard_name(0)}")


def uploads_left(proxy) -> int:
    """Uploads begun that were neither completed nor aborted, by what passed the proxy."""
    counts = proxy.counts()
    return counts["begin"] - counts["complete"] - counts["abort"]


def test_a_shard_goes_up_in_parts_and_is_read_back_before_its_part_of_the_manifest(proxy, saved, persister):
    save = saved()
    persister.persist(save)
    kinds = [request.kind for request in proxy.seen("part|begin|complete|get|put", "rank-00000")]
    assert kinds[0] == "begin" and kinds.count("part") == 4
    assert kinds.index("complete") < kinds.index("get") < kinds.index("put")
    assert kinds.count("get") == 2
    assert shard_in(persister.store, save) == save.arena.buffer
    part = json.loads(persister.store.read(f"{save.attempt}/{part_name(0)}"))
    chunks = [chunk_digest(DEFAULT, save.arena.buffer[at : at + CHUNK]) for at in range(0, save.size, CHUNK)]
    assert part["file"]["chunks"] == chunks and part["file"]["size"] == save.size


def test_the_upload_begins_while_the_shard_is_still_being_staged(proxy, saved, persister):
    save = saved(stage=False)
    thread = threading.Thread(target=persister.persist, args=(save,))
    thread.start()
    save.arena.watermark = fill(save.arena, layout_of(17), 1, upto=16 * MIB + 5)
    assert waited_for(lambda: len(proxy.seen("part")) >= 3)
    assert len(proxy.seen("part")) == 3, "only what is staged is sent: the whole chunk, in parts of 5 MiB"
    save.arena.watermark = fill(save.arena, layout_of(17), 1)
    save.seal(part_of(RUN_ID, save.attempt))
    thread.join()
    assert shard_in(persister.store, save) == save.arena.buffer


def test_what_sends_a_shard_has_less_priority_than_training(s3_env, s3_root):
    script = (
        "import os\n"
        "from ckpt.store import open_store\n"
        "from ckpt.writer.options import WriterOptions\n"
        "from ckpt.writer.persist import Persister\n"
        f"Persister(open_store({s3_root!r}), 0, WriterOptions(), print).store.size('a')\n"
        "for task in os.listdir('/proc/self/task'):\n"
        "    name = open(f'/proc/self/task/{task}/comm').read().strip()\n"
        "    print(name, os.getpriority(os.PRIO_PROCESS, int(task)))\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    senders = [line.split() for line in said.splitlines() if line.startswith("tokio")]
    assert senders and all(int(nice) >= 10 for _, nice in senders)


def test_a_small_shard_is_one_put(proxy, persister):
    layout = layout_of(1)
    with Arena.create(layout.size) as arena:
        tensors = part_tensors([placed.slice for placed in layout.placed], layout)
        save = Save(attempt_of(1), arena, layout.size, tensors)
        arena.watermark = fill(arena, layout, 1)
        save.seal(part_of(RUN_ID, save.attempt))
        persister.persist(save)
        assert shard_in(persister.store, save) == arena.buffer
    assert len(proxy.seen("put", SHARD)) == 1 and not proxy.seen("begin")


@pytest.mark.parametrize("fault", [SLOW_DOWN, RESET_MIDWAY, LOST_REPLY])
def test_a_part_that_fails_once_is_sent_again_without_starting_over(proxy, saved, persister, fault):
    rule = proxy.inject(fault, "part", SHARD, times=2, skip=1)
    save = saved()
    persister.persist(save)
    assert rule.hits == 2
    assert proxy.counts()["begin"] == 1 and proxy.counts()["part"] == 6
    assert shard_in(persister.store, save) == save.arena.buffer


@pytest.mark.parametrize("fault", [SLOW_DOWN, LOST_REPLY])
def test_beginning_and_completing_may_fail_once(proxy, saved, persister, fault):
    proxy.inject(fault, "begin", SHARD, times=1)
    proxy.inject(fault, "complete", SHARD, times=1)
    save = saved()
    persister.persist(save)
    assert shard_in(persister.store, save) == save.arena.buffer


def test_a_save_that_is_void_aborts_its_upload(proxy, saved, persister):
    save = saved(stage=False)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            persister.persist(save)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    save.arena.watermark = fill(save.arena, layout_of(17), 1, upto=16 * MIB + 5)
    assert waited_for(lambda: len(proxy.seen("part")) >= 3)
    save.stop("tried")
    thread.join(10)
    assert isinstance(outcome[0], VoidError)
    assert proxy.counts()["abort"] == 1 and uploads_left(proxy) == 0
    assert persister.store.size(f"{save.attempt}/{shard_name(0)}") is None


def test_a_refused_upload_is_aborted_and_fails_the_save(proxy, saved, persister):
    proxy.inject(DENIED, "part", SHARD)
    save = saved()
    with pytest.raises(StorageError, match="AccessDenied"):
        persister.persist(save)
    assert uploads_left(proxy) == 0
    assert persister.store.size(f"{save.attempt}/{part_name(0)}") is None


def test_expired_keys_start_the_shard_over_with_newer_ones(proxy, saved, persister):
    rule = proxy.inject(EXPIRED, "part", SHARD, times=1, skip=2)
    save = saved()
    persister.persist(save)
    assert rule.hits == 1 and proxy.counts()["begin"] == 2 and uploads_left(proxy) == 0
    assert shard_in(persister.store, save) == save.arena.buffer


def test_bytes_changed_on_their_way_up_get_no_part_until_they_are_right(proxy, saved, persister):
    rule = proxy.inject(FLIP_REQUEST, "part", SHARD, times=1, skip=1)
    save = saved()
    persister.persist(save)
    assert rule.hits == 1
    assert shard_in(persister.store, save) == save.arena.buffer


def test_a_store_that_always_changes_bytes_gets_no_part(proxy, saved, persister):
    proxy.inject(FLIP_REQUEST, "part", SHARD)
    persister.options = WriterOptions(retry_s=0)
    save = saved()
    with pytest.raises(StorageError):
        persister.persist(save)
    assert persister.store.size(f"{save.attempt}/{part_name(0)}") is None


@pytest.fixture
def stored(small_parts, s3_root):
    """A shard of a chunk and a bit that is in the store, as its content, store and files."""
    content = random.Random(5).randbytes(CHUNK + 1_000_003)
    store = open_store(s3_root)
    obstore.put(store.raw, store._key("a/s"), content, use_multipart=False)
    chunks = tuple(chunk_digest(DEFAULT, content[at : at + CHUNK]) for at in range(0, len(content), CHUNK))
    entry = FileEntry("s", len(content), DEFAULT, file_digest(DEFAULT, chunks), chunks)
    return content, store, {"s": entry}


def read(stored) -> bytes:
    content, store, files = stored
    target = bytearray(len(content))
    read_verified(store, "a", files, [Want("s", 0, len(content), memoryview(target))])
    return bytes(target)


def test_a_shard_comes_back_by_one_request_a_chunk(proxy, stored):
    assert read(stored) == stored[0]
    assert len(proxy.seen("get", "/s$")) == 2 and len(proxy.seen("head", "/s$")) == 1


@pytest.mark.parametrize("fault", [SLOW_DOWN, RESET, TRUNCATE, FLIP_REPLY, EXPIRED])
def test_an_answer_that_is_cut_changed_or_refused_once_is_asked_for_again(proxy, stored, fault):
    rule = proxy.inject(fault, "get", "/s$", times=1, skip=1)
    assert read(stored) == stored[0]
    assert rule.hits == 1


def test_bytes_that_always_come_back_changed_are_never_handed_out(proxy, stored):
    proxy.inject(FLIP_REPLY, "get", "/s$")
    with pytest.raises(Corrupt, match=r"a/s: chunk \d .* is damaged"):
        read(stored)


def test_answers_that_are_always_cut_end_as_an_error(proxy, stored, monkeypatch):
    proxy.inject(TRUNCATE, "get", "/s$")
    content, store, files = stored
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "1")
    monkeypatch.setattr(reader, "_PATIENCE_S", 0.5)
    with pytest.raises((Corrupt, StorageError)):
        read((content, open_store(store.uri), files))


def test_a_shard_that_is_missing_or_of_another_size_is_corrupt(stored):
    content, store, _ = stored
    store.put("a/s", content[:-1])
    with pytest.raises(Corrupt, match="bytes, the manifest says"):
        read(stored)
    store.delete("a/s")
    with pytest.raises(Corrupt, match="missing"):
        read(stored)


@pytest.fixture
def run(tmp_path):
    """A run in a folder, with two checkpoints."""
    made = making.run_at(tmp_path / "run")
    making.launch(made, 1, fresh=True)
    for step in (1, 2):
        making.checkpoint(made, step, world_size=2)
    return made


def test_a_copy_goes_to_the_bucket_and_back_and_is_the_run(proxy, run, small_parts, s3_root, tmp_path):
    proxy.inject(SLOW_DOWN, "put", "rank-", times=2)
    proxy.inject(FLIP_REQUEST, "put", SHARD, times=1)
    proxy.inject(TRUNCATE, "get", "manifest", times=1)
    there = copy(run.uri, s3_root)
    assert there.ok and len(there.copied) == 2
    assert copy(run.uri, s3_root).present == there.copied
    back = copy(s3_root, str(tmp_path / "back"))
    assert back.copied == there.copied
    assert making.tree_digest(tmp_path / "back") == making.tree_digest(tmp_path / "run")


def test_an_answer_changed_on_its_way_makes_no_checkpoint_bad_and_what_stays_changed_does(
    proxy, run, small_parts, s3_root
):
    newest = copy(run.uri, s3_root).copied[0]
    rule = proxy.inject(FLIP_REPLY, "get", f"{newest}/{SHARD}", times=1)
    assert verify(f"{s3_root}/{newest}").ok and rule.hits == 1
    proxy.inject(FLIP_REPLY, "get", f"{newest}/{SHARD}")
    assert not verify(f"{s3_root}/{newest}").ok
    assert latest_valid(s3_root, say=print).step == 1


def test_a_copy_through_a_store_that_changes_bytes_is_not_committed(
    proxy, run, small_parts, s3_root, monkeypatch
):
    monkeypatch.setattr(copying, "_RETRY_S", 0.3)
    proxy.inject(FLIP_REQUEST, "put", SHARD)
    done = copy(run.uri, s3_root)
    assert len(done.problems) == 2 and not committed(open_run(s3_root, create=False))


def test_a_plain_recursive_upload_of_a_run_is_the_run_as_well(run, s3_env, s3_root):
    store = open_store(s3_root)
    folder = run.store.path("")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())
    there = latest_valid(s3_root)
    assert there.step == 2 and open_run(s3_root, create=False).id == run.id
    launch = begin_launch(open_run(s3_root), owner="", config=None, say=print)
    record_parent(open_run(s3_root), launch, there)
    assert launch.number == 2


@pytest.fixture
def client(object_server):
    session = pytest.importorskip("botocore.session")
    return session.get_session().create_client(
        "s3",
        endpoint_url=object_server.endpoint,
        region_name=object_server.region,
        aws_access_key_id=object_server.access_key,
        aws_secret_access_key=object_server.secret_key,
    )


def test_a_launch_ends_the_uploads_that_older_ones_left_in_its_run_and_no_others(
    client, s3_env, s3_root, object_server
):
    prefix = s3_root.partition(f"//{object_server.bucket}/")[2] + "/a run+&=ä"
    run = open_run(f"s3://{object_server.bucket}/{prefix}")
    left = [f"{prefix}/{attempt_of(step)}/{shard_name(0)}" for step in (1, 2)]
    others = [
        f"{prefix}/{attempt_of(3, launch=2)}/{shard_name(0)}",
        f"{prefix}/mine/big",
        f"{prefix}-2/{attempt_of(1)}/{shard_name(0)}",
    ]
    for key in left + others:
        client.create_multipart_upload(Bucket=object_server.bucket, Key=key)
    begin_launch(run, owner="x", config=None, say=print)
    said: list[str] = []
    begin_launch(run, owner="x", config=None, say=said.append)
    found = client.list_multipart_uploads(Bucket=object_server.bucket)["Uploads"]
    assert {upload["Key"] for upload in found if upload["Key"].startswith(prefix)} == set(others)
    assert [line for line in said if "2 unfinished uploads" in line]


def test_a_store_that_does_not_list_uploads_keeps_no_launch_from_beginning(proxy, proxied_env, s3_root):
    proxy.inject(DENIED, "other")
    said: list[str] = []
    begin_launch(open_run(s3_root), owner="x", config=None, say=said.append)
    assert [line for line in said if "HTTP 403" in line]


def waited_for(condition, seconds=10.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())
