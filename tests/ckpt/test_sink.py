"""Multipart uploads: what is written arrives whole and in order, or nothing does."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time

import pytest

from ckpt.errors import StorageError
from ckpt.stores.multipart import MAX_PARTS, MultipartSink, part_size

MIB = 1 << 20
PART = 5 * MIB
SIZE = 4 * PART + 12_345

obstore = pytest.importorskip("obstore")
store_module = pytest.importorskip("obstore.store")


@pytest.fixture(scope="module")
def content():
    return memoryview(random.Random(3).randbytes(SIZE + 4096))


@pytest.fixture
def store():
    return store_module.MemoryStore()


def call(verb, work):
    try:
        return work()
    except obstore.exceptions.BaseError as error:
        raise StorageError(f"can't {verb} it") from OSError(errno.EIO, str(error))


def sink_of(store, size=SIZE, in_flight=2):
    return MultipartSink(store, "a/s", size, call, part=PART, in_flight=in_flight)


def stored(store):
    return bytes(obstore.get(store, "a/s").bytes())


@pytest.mark.parametrize("block", [MIB, PART, 3 * MIB])
def test_blocks_written_in_any_order_by_several_threads_arrive_as_one_object(store, content, block):
    sink = sink_of(store)
    offsets = list(range(0, SIZE, block))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                # A little out of order, as threads are.
                if not offsets:
                    return
                offset = offsets.pop(min(len(offsets) - 1, random.randrange(2)))
            end = min(offset + block, -(-SIZE // 4096) * 4096)
            sink.write(content[offset:end], offset)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.finish()
    sink.close()
    assert stored(store) == content[:SIZE]


def test_a_small_object_is_put_in_one_piece(store, content):
    sink = sink_of(store, size=1000)
    sink.write(content[:4096], 0)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a/s")
    sink.finish()
    assert stored(store) == content[:1000]


def test_what_is_closed_unfinished_leaves_nothing(store, content):
    for size in (1000, SIZE):
        sink = sink_of(store, size=size)
        sink.write(content[: min(size, PART)], 0)
        sink.close()
        with pytest.raises(FileNotFoundError):
            obstore.head(store, "a/s")


def test_no_more_is_on_its_way_than_the_parts_in_flight_and_two(store, content):
    """A writer far ahead of the upload has to wait, and the one whose block is missing never does."""
    sink = sink_of(store, size=100 * PART, in_flight=1)
    written = []

    def ahead() -> None:
        with contextlib.suppress(StorageError):
            for number in range(1, 100):
                sink.write(content[:PART], number * PART)
                written.append(number)

    thread = threading.Thread(target=ahead, daemon=True)
    thread.start()
    deadline = time.monotonic() + 5
    while len(written) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert written == [1, 2, 3]
    sink.write(content[:PART], 0)
    while len(written) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(written) >= 10
    thread.join()
    sink.finish()


def test_who_waits_for_a_block_that_never_comes_is_told_once_the_upload_is_given_up(store, content):
    sink = sink_of(store, size=100 * PART, in_flight=1)
    outcome: list[BaseException] = []

    def ahead() -> None:
        try:
            for number in range(1, 100):
                sink.write(content[:PART], number * PART)
        except StorageError as error:
            outcome.append(error)

    thread = threading.Thread(target=ahead, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    sink.abandon()
    thread.join(5)
    sink.close()
    assert outcome and "no longer written" in str(outcome[0])


def test_memory_is_let_go_of_once_its_part_is_there(store):
    sink = sink_of(store, size=3 * PART)
    block = memoryview(bytearray(PART))
    for offset in range(0, 3 * PART, PART):
        sink.write(block, offset)
    sink.finish()
    block.release()  # BufferError if anything still held it


def test_an_upload_that_failed_is_told_to_writers_and_at_the_end(content):
    nowhere = store_module.S3Store(
        "b",
        endpoint="http://127.0.0.1:1",
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    sink = sink_of(nowhere)
    with pytest.raises(StorageError, match="can't write"):
        for offset in range(0, SIZE, PART):
            time.sleep(0.05)
            sink.write(content[offset : offset + PART], offset)
    with pytest.raises(StorageError, match="can't write"):
        sink.finish()
    sink.close()


@pytest.mark.parametrize("there", [True, False])
def test_an_upload_that_the_store_no_longer_knows_counts_only_if_its_object_is_there(store, content, there):
    """The answer to the completion was lost, and the completion was asked for again."""

    def forgetful(verb, work):
        done = call(verb, work)
        if verb != "write":
            return done
        if not there:
            obstore.delete(store, "a/s")
        raise FileNotFoundError

    sink = MultipartSink(store, "a/s", SIZE, forgetful, part=PART, in_flight=2)
    for offset in range(0, SIZE, PART):
        sink.write(content[offset : offset + PART], offset)
    if there:
        sink.finish()
        assert stored(store) == content[:SIZE]
    else:
        with pytest.raises(StorageError) as failed:
            sink.finish()
        assert failed.value.__cause__.errno == errno.EAGAIN


def test_parts_grow_so_that_ten_thousand_are_enough():
    assert part_size(1, 16 * MIB) == part_size(MAX_PARTS * 16 * MIB, 16 * MIB) == 16 * MIB
    for size in (MAX_PARTS * 16 * MIB + 1, 400 << 30, 5 << 40):
        part = part_size(size, 16 * MIB)
        assert part % MIB == 0 and -(-size // part) <= MAX_PARTS
        assert (part - MIB) * MAX_PARTS < size
