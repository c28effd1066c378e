import errno
import json
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from ckpt import direct_io, faults
from ckpt.direct_io import PAGE, ShardFile
from ckpt.discover import latest_valid
from ckpt.writer.events import Committed, Durable, Failed
from tests.ckpt.writing import MIB, Saver, attempt_of, files_in, new_run


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch):
    monkeypatch.setattr(direct_io, "_buffered_devices", set())


@pytest.fixture
def strike(monkeypatch):
    def load(*items) -> None:
        monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(items)))

    return load


@pytest.fixture
def block():
    with mmap.mmap(-1, 4 * PAGE) as memory:
        memory.write(bytes(range(256)) * (4 * PAGE // 256))
        view = memoryview(memory)
        yield view
        view.release()


@pytest.fixture
def mounted(tmp_path):
    """Mounts a file system of a kind, or skips with the reason."""
    places: list[Path] = []

    def mount(kind: str, size: int) -> Path:
        place = tmp_path / kind
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", kind, "-o", f"size={size}", kind, str(place)], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"can't mount a {kind} here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def write(path: Path, size: int, block: memoryview, direct: bool = True) -> tuple[ShardFile, list[str]]:
    said: list[str] = []
    file = ShardFile(path, size, direct, said.append)
    file.write(block, 0)
    file.finish()
    return file, said


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [4 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1])
def test_the_padding_is_cut_and_the_bytes_are_exact(tmp_path, block, direct, size):
    write(tmp_path / "shard", size, block, direct)
    assert (tmp_path / "shard").read_bytes() == bytes(block[:size])


def test_a_refusal_to_open_directly_falls_back_and_is_said_once(tmp_path, block, strike):
    strike({"match": "open:", "nth": 1, "do": "raise", "errno": errno.EINVAL})
    file, said = write(tmp_path / "a", 4 * PAGE, block)
    assert not file.direct and len(said) == 1 and "O_DIRECT is refused" in said[0]
    file, said = write(tmp_path / "b", 4 * PAGE, block)
    assert not file.direct and not said
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == bytes(block)


def test_a_refusal_to_write_directly_falls_back_in_the_middle_of_the_file(tmp_path, block, strike):
    strike({"match": "pwrite:", "nth": 2, "do": "raise", "errno": errno.EINVAL})
    said: list[str] = []
    file = ShardFile(tmp_path / "shard", 4 * PAGE, True, said.append)
    for start in range(0, 4 * PAGE, PAGE):
        file.write(block[start : start + PAGE], start)
    assert not file.direct and len(said) == 1
    file.finish()
    assert (tmp_path / "shard").read_bytes() == bytes(block)


def test_an_error_of_a_buffered_write_is_not_taken_for_a_refusal(tmp_path, block, strike):
    strike({"match": "pwrite:", "do": "raise", "errno": errno.EINVAL})
    file = ShardFile(tmp_path / "shard", 4 * PAGE, False, print)
    with pytest.raises(OSError):
        file.write(block, 0)
    file.close()


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "shard").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        ShardFile(tmp_path / "shard", 1, True, print)
    assert (tmp_path / "shard").read_bytes() == b"precious"


def test_a_file_cut_behind_our_back_is_noticed(tmp_path, block, strike):
    strike({"match": "fsync:", "do": "cut"})
    with pytest.raises(OSError, match="bytes after its fsync"):
        write(tmp_path / "shard", 4 * PAGE, block)


def test_a_short_write_is_continued(tmp_path, block, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:PAGE], offset))
    write(tmp_path / "shard", 4 * PAGE, block)
    assert (tmp_path / "shard").read_bytes() == bytes(block)


def test_a_file_system_without_o_direct_is_written_through_the_cache(mounted):
    """ramfs knows no O_DIRECT."""
    run = new_run(mounted("ramfs", 64 * MIB) / "run")
    saver = Saver(run, mib=4)
    for step in (1, 2):
        attempt, event = saver.save(step)
        assert isinstance(event, Durable)
        assert isinstance(saver.commit(attempt), Committed)
        assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)
    saver.close()
    assert len([line for line in saver.notices if "O_DIRECT" in line]) == 1
    assert latest_valid(run.uri, verify="full").step == 2


def test_a_full_disk_voids_the_save_says_what_it_needed_and_keeps_the_earlier_ones(mounted):
    run = new_run(mounted("tmpfs", 26 * MIB) / "run")
    saver = Saver(run, mib=10)
    for step in (1, 2):
        attempt, event = saver.save(step)
        assert isinstance(event, Durable)
        assert isinstance(saver.commit(attempt), Committed)
    before = files_in(run)
    third, event = saver.save(3)
    assert isinstance(event, Failed) and event.errno == errno.ENOSPC
    assert f"needs {saver.layout.size} bytes" in event.error and "are free" in event.error
    assert files_in(run) == before and not Path(run.uri, third).exists()
    assert latest_valid(run.uri, verify="full").step == 2
    saver.client.prune([attempt_of(1)])
    assert saver.event().warnings == []
    fourth, event = saver.save(4)
    assert isinstance(event, Durable)
    assert isinstance(saver.commit(fourth), Committed)
    saver.close()
