"""A shard goes to the disk through huge pages where its arena has none, and no byte of it changes by that."""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from ckpt import digest, huge_pages
from ckpt.layout import part_tensors
from ckpt.manifest import parse_part
from ckpt.store import open_store
from ckpt.writer import bounce, priority
from ckpt.writer.options import WriterOptions
from ckpt.writer.persist import Persister
from ckpt.writer.save import Save
from tests.ckpt.writing import (
    MIB,
    PATIENCE_S,
    Arena,
    Saver,
    attempt_of,
    fill,
    layout_of,
    new_run,
    part_of,
    wait_until,
)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The kernel's settings, as a folder to write into; what was learnt of them before is forgotten."""

    def learn(enabled="madvise", shmem="never", size=2 * MIB):
        for name, text in (("enabled", enabled), ("shmem_enabled", shmem), ("hpage_pmd_size", str(size))):
            choices = "always within_size advise madvise never deny force".replace(text, f"[{text}]", 1)
            (tmp_path / name).write_text(text if name == "hpage_pmd_size" else choices)
        huge_pages.huge_page.cache_clear()
        huge_pages.shared_is_huge.cache_clear()

    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    huge_pages.huge_page.cache_clear()
    huge_pages.shared_is_huge.cache_clear()
    yield learn
    huge_pages.huge_page.cache_clear()
    huge_pages.shared_is_huge.cache_clear()


@pytest.mark.parametrize(
    "given, huge, pays",
    [
        ({}, 2 * MIB, True),
        ({"enabled": "always"}, 2 * MIB, True),
        ({"enabled": "never"}, 0, False),
        ({"size": 512 * MIB}, 0, False),
        ({"shmem": "advise"}, 2 * MIB, False),
        ({"shmem": "deny"}, 2 * MIB, True),
    ],
)
def test_buffers_are_used_where_only_private_memory_has_huge_pages(settings, given, huge, pays):
    settings(**given)
    assert huge_pages.huge_page() == huge
    assert bounce.Buffers.pay() is pays


@pytest.mark.usefixtures("settings")
def test_a_system_without_huge_pages_has_page_aligned_memory_and_no_buffers():
    assert huge_pages.huge_page() == 0
    assert not bounce.Buffers.pay()
    assert address(huge_pages.private_memory(5 * MIB)) % 4096 == 0


def test_private_memory_is_zeroed_writable_of_its_size_and_aligned(settings):
    settings()
    memory = huge_pages.private_memory(3 * MIB + 5)
    assert len(memory) == 3 * MIB + 5
    assert address(memory) % (2 * MIB) == 0
    assert not any(memory)
    memory[-1] = 7
    assert memory[-1] == 7


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3"])
@pytest.mark.parametrize(
    "size, hashed", [(4096, 1), (300 << 10, 300 << 10), (MIB, MIB - 4095), (256 << 10, 256 << 10)]
)
def test_a_copy_is_equal_and_only_what_is_no_padding_is_hashed(kind, size, hashed):
    source = memoryview(os.urandom(size))
    target = memoryview(bytearray(2 * MIB))
    hasher = digest.new_hasher(kind)
    bounce.copy_hashing(source, target, hasher, hashed)
    assert target[:size] == source
    assert hasher.hexdigest() == digest.chunk_digest(kind, source[:hashed])


@pytest.mark.parametrize("block", [MIB, 16 * MIB])
def test_the_same_shard_and_digests_arrive_with_and_without_buffers(tmp_path, block):
    layout = layout_of(33)
    tensors = part_tensors([placed.slice for placed in layout.placed], layout)
    found = []
    for number, buffers in enumerate((None, bounce.Buffers(block))):
        store = open_store(tmp_path / str(number))
        store.make_dir("")
        persister = Persister(store, 0, WriterOptions(block=block), print)
        persister.buffers = buffers
        with Arena.create(layout.size) as arena:
            save = Save(attempt_of(1), arena, layout.size, tensors)
            arena.watermark = fill(arena, layout, 1)
            save.seal(part_of("0" * 32, save.attempt))
            persister.persist(save)
            content = store.read(f"{save.attempt}/rank-00000.safetensors")
            assert content == bytes(arena.buffer)
        part = parse_part(store.read(f"{save.attempt}/rank-00000.json"))
        assert part["file"]["chunks"] == [
            digest.chunk_digest("xxh3-128", content[at : at + digest.CHUNK])
            for at in range(0, len(content), digest.CHUNK)
        ]
        found.append((content, part["file"]))
    assert found[0] == found[1]


def test_buffers_are_kept_for_the_next_shard():
    buffers = bounce.Buffers(MIB)
    one, two = buffers.take(), buffers.take()
    assert address(one) != address(two)
    buffers.give_back(two)
    assert address(buffers.take()) == address(two)


def test_a_session_is_lowered_once_and_restored_without_waiting_for_ever(tmp_path, monkeypatch):
    autogroup = tmp_path / "autogroup"
    written = []

    class Kernel(type(autogroup)):
        def write_text(self, text, **_):
            written.append(int(text))
            if len(written) < 3:
                raise OSError(errno.EAGAIN, "one change in a tenth of a second")

    monkeypatch.setattr(priority, "_AUTOGROUP", Kernel(autogroup))
    session = priority.Session(own=True)
    session.lower()
    session.lower()
    assert written == [10, 10, 10]
    session.restore()
    assert written[-1] == 0


def test_a_system_that_groups_nothing_and_a_session_of_others_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(priority, "_AUTOGROUP", tmp_path / "not" / "there")
    priority.Session(own=True).lower()
    there = tmp_path / "autogroup"
    there.write_text("0")
    monkeypatch.setattr(priority, "_AUTOGROUP", there)
    priority.Session(own=False).lower()
    assert there.read_text() == "0"


def test_the_writers_own_session_gets_less_than_training_until_somebody_waits(tmp_path):
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not group processes by session")
    saver = Saver(new_run(tmp_path / "run"))
    saver.begin(1)
    autogroup = Path(f"/proc/{saver.client.pid}/autogroup")
    wait_until(lambda: autogroup.read_text().endswith("nice 10\n"), "the session is lowered")
    # Empty where this process was started in no session of its own, and so is in no group.
    assert "nice 10" not in Path("/proc/self/autogroup").read_text()
    saver.client.hurry()
    wait_until(lambda: autogroup.read_text().endswith("nice 0\n"), "the session has its share again")
    assert saver.client.close(PATIENCE_S)


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
