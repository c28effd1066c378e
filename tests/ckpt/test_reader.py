"""Verified reads: nothing unproven is handed out, and everything asked for is."""

import ctypes
import errno
import mmap
import os
import random

import pytest

from ckpt import faults
from ckpt.digest import CHUNK, DEFAULT, chunk_digest, file_digest
from ckpt.errors import Corrupt, StorageError
from ckpt.manifest import FileEntry
from ckpt.reader import Want, read_verified
from ckpt.store import open_store

SIZE = 2 * CHUNK + 5_000_001
FEW_PAGES = SIZE // 4096 // 100


@pytest.fixture(scope="module")
def content():
    return random.Random(7).randbytes(SIZE)


@pytest.fixture
def shard(tmp_path, content):
    """A store with a shard of two and a bit chunks, and what its manifest says of it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "s").write_bytes(content)
    chunks = tuple(chunk_digest(DEFAULT, content[at : at + CHUNK]) for at in range(0, SIZE, CHUNK))
    entry = FileEntry("s", SIZE, DEFAULT, file_digest(DEFAULT, chunks), chunks)
    return open_store(tmp_path), {"s": entry}, tmp_path / "a" / "s"


def read(shard, *ranges, **options):
    """The bytes of each range `(start, end)` or `(start, end, run, pitch)`."""
    store, files, _ = shard
    wants = []
    for start, end, *pattern in ranges:
        want = Want("s", start, end, memoryview(b""), *pattern)
        wants.append(Want("s", start, end, memoryview(bytearray(want.nbytes)), *pattern))
    read_verified(store, "a", files, wants, **options)
    return [bytes(want.into) for want in wants]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_every_range_comes_back_whatever_chunks_it_touches(shard, content, direct, threads):
    rng = random.Random(threads)
    points = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, SIZE - 1, SIZE] + [
        rng.randrange(SIZE) for _ in range(8)
    ]
    ranges = [tuple(sorted(rng.sample(points, 2))) for _ in range(25)] + [(0, SIZE), (5, 5)]
    for (start, end), got in zip(ranges, read(shard, *ranges, direct=direct, threads=threads), strict=True):
        assert got == content[start:end], (start, end)


def test_each_touched_chunk_is_read_once(shard):
    store, files, _ = shard
    wants = [Want("s", at, at + 10, memoryview(bytearray(10))) for at in range(0, CHUNK, 1_000_000)]
    assert read_verified(store, "a", files, wants) == CHUNK
    last = Want("s", SIZE - 1, SIZE, memoryview(bytearray(1)))
    assert read_verified(store, "a", files, [last]) == SIZE - 2 * CHUNK


@pytest.mark.parametrize(
    ("start", "run", "pitch", "rows"),
    [
        (4096, 3, 10, 3_000_000),
        (CHUNK - 7, 100, 1_000, 20_000),
        (11, CHUNK - 5, CHUNK, 2),
        (CHUNK - 50, 100, 101, 1),
        (0, 1, CHUNK + 1, 2),
    ],
)
def test_columns_come_out_of_rows_that_cross_chunks(shard, content, start, run, pitch, rows):
    end = start + (rows - 1) * pitch + run
    [got] = read(shard, (start, end, run, pitch))
    assert got == b"".join(content[start + r * pitch : start + r * pitch + run] for r in range(rows))


@pytest.mark.parametrize("at", [0, CHUNK + 12345, SIZE - 1])
def test_a_flipped_bit_is_found_before_its_bytes_are_handed_out(shard, at):
    _, _, path = shard
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    near = max(0, at - 100)
    target = bytearray(b"\xee" * (min(SIZE, at + 100) - near))
    with pytest.raises(Corrupt, match=rf"a/s.*chunk {at // CHUNK} .*damaged"):
        read_verified(shard[0], "a", shard[1], [Want("s", near, near + len(target), memoryview(target))])
    assert set(target) == {0xEE}


def test_damage_elsewhere_in_a_touched_chunk_counts_and_in_an_untouched_one_does_not(shard, content):
    _, _, path = shard
    with path.open("r+b") as file:
        file.seek(CHUNK + 5)
        file.write(bytes([content[CHUNK + 5] ^ 1]))
    with pytest.raises(Corrupt):
        read(shard, (2 * CHUNK - 9, 2 * CHUNK))
    assert read(shard, (0, 100), (2 * CHUNK, SIZE)) == [content[:100], content[2 * CHUNK :]]


def test_a_cut_shard_and_a_longer_one_are_named(shard):
    _, _, path = shard
    for size in (SIZE - 1, 0, SIZE + 1):
        os.truncate(path, size)
        with pytest.raises(Corrupt, match=rf"a/s.*{size} bytes.*{SIZE}"):
            read(shard, (0, 10))


def test_a_missing_shard_is_named(shard):
    shard[2].unlink()
    with pytest.raises(Corrupt, match=r"a/s.*missing"):
        read(shard, (0, 10))


def test_a_pipe_or_folder_in_the_shards_place_does_not_hang(shard):
    _, _, path = shard
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Corrupt, match="a/s"):
        read(shard, (0, 10))
    path.unlink()
    path.mkdir()
    with pytest.raises(Corrupt, match="a/s"):
        read(shard, (0, 10))


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (SIZE - 1, SIZE + 1), (10, 5), (1 << 60, (1 << 60) + 1)])
def test_ranges_outside_the_file_are_refused_before_anything_is_read(shard, start, end):
    want = Want("s", start, end, memoryview(bytearray(max(0, min(end - start, 100)))))
    with pytest.raises(Corrupt, match="outside"):
        read_verified(shard[0], "a", shard[1], [want])


def test_a_file_that_the_manifest_does_not_name_is_refused(shard):
    with pytest.raises(Corrupt, match="secret"):
        read_verified(shard[0], "a", shard[1], [Want("../secret", 0, 1, memoryview(bytearray(1)))])


def test_too_few_digests_are_refused(shard):
    store, files, _ = shard
    short = {"s": files["s"]._replace(chunks=files["s"].chunks[:-1])}
    with pytest.raises(Corrupt, match="digests"):
        read_verified(store, "a", short, [Want("s", 0, 1, memoryview(bytearray(1)))])


def test_a_read_error_that_passes_is_tried_again_and_one_that_stays_is_named(shard, content, monkeypatch):
    rule = '[{"match": "trainer:read:a/s", "nth": 1, "do": "raise", "errno": 5}]'
    monkeypatch.setattr(faults, "_rules", faults.parse(rule))
    assert read(shard, (3, 9)) == [content[3:9]]
    monkeypatch.setattr(faults, "_rules", faults.parse(rule.replace('"nth": 1', '"nth": 0')))
    with pytest.raises(StorageError, match="a/s") as failed:
        read(shard, (3, 9))
    assert failed.value.__cause__.errno == errno.EIO


def test_no_file_stays_open_after_a_read_or_a_failure(shard):
    before = len(os.listdir("/proc/self/fd"))
    read(shard, (0, SIZE))
    shard[2].write_bytes(b"")
    with pytest.raises(Corrupt):
        read(shard, (0, 5))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("direct", [True, False])
def test_reading_leaves_nothing_in_the_page_cache(shard, direct):
    path = dropped(shard)
    read(shard, (0, SIZE), direct=direct)
    assert cached_pages(path) <= FEW_PAGES


def dropped(shard):
    """The path of the shard's file, of which the page cache holds nothing."""
    path = shard[2]
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system keeps its pages")
    return path


def cached_pages(path):
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        flags = (ctypes.c_ubyte * -(-size // 4096))()
        start = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags) == 0
        del start
        return sum(flag & 1 for flag in flags)
