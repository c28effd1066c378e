"""Ranged reads of one object."""

from __future__ import annotations

import errno
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.errors import Corrupt, StorageError
from ckpt.stores.ranges import RangeSource

SIZE = 3_000_017

obstore = pytest.importorskip("obstore")
store_module = pytest.importorskip("obstore.store")


@pytest.fixture(scope="module")
def content():
    return random.Random(4).randbytes(SIZE)


@pytest.fixture
def store(content):
    made = store_module.MemoryStore()
    obstore.put(made, "a/s", content)
    return made


def call(_, work):
    return work()


def source_of(store):
    return RangeSource(lambda: store, "a/s", call, parallel=3)


def test_ranges_read_at_once_fill_what_they_are_given(store, content):
    source = source_of(store)
    assert source.size == SIZE and source.parallel == 3 and not source.direct
    whole = bytearray(SIZE)
    bounds = [*range(0, SIZE, 100_003), SIZE]

    def read(start, end):
        source.read_into(start, memoryview(whole)[start:end])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, bounds[:-1], bounds[1:]))
    source.read_into(SIZE, memoryview(bytearray()))
    source.close()
    source.close()
    assert whole == content


def test_what_lies_behind_the_end_is_corrupt_and_nothing_is_filled(store):
    into = bytearray(10)
    with pytest.raises(Corrupt, match=f"ends at byte {SIZE}"):
        source_of(store).read_into(SIZE - 9, memoryview(into))
    assert not any(into)


def test_an_object_that_is_not_there_is_said_to_be_missing():
    with pytest.raises(FileNotFoundError):
        source_of(store_module.MemoryStore())


def test_an_object_that_got_shorter_since_it_was_opened_is_an_error(store, content):
    source = source_of(store)
    obstore.put(store, "a/s", content[:-5])
    with pytest.raises(StorageError) as failed:
        source.read_into(SIZE - 10, memoryview(bytearray(10)))
    assert failed.value.__cause__.errno == errno.EIO
