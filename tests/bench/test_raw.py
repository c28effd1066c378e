"""The raw limits and the floor: plain bytes, as fast as the hardware takes them."""

import time
from pathlib import Path

import pytest
import torch

from bench import rawio
from bench.copying import Copier
from bench.disk import RawDisk
from bench.engines.floor import Floor
from bench.workload import Workload
from ckpt import huge_pages

SIZE = 2_000_000
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def small(device="cpu"):
    return Workload(SIZE, 30, device)


def mapping_of(buffer):
    """The lines of /proc/self/smaps about the mapping that holds all of `buffer`."""
    start = huge_pages.ctypes.addressof(huge_pages.ctypes.c_char.from_buffer(buffer))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for number, line in enumerate(lines):
        ends = [int(end, 16) for end in line.split()[0].split("-")] if "-" in line.split()[0] else []
        if len(ends) == 2 and ends[0] <= start and start + len(buffer) <= ends[1]:
            return start, lines[number : number + 30]
    raise AssertionError("the buffer is not mapped")


def test_the_raw_limits_move_memory_as_disks_like_it():
    for buffer in rawio.block_buffers(2):
        start, about = mapping_of(buffer)
        assert len(buffer) == rawio.BLOCK
        assert about[0].split()[1] == "rw-p"  # private: shared memory has small pages
        if huge_pages.huge_page():
            assert start % huge_pages.huge_page() == 0
            flags = next(line for line in about if line.startswith("VmFlags:"))
            assert "hg" in flags.split()
        else:
            assert start % 4096 == 0


def test_raw_bytes_are_written_and_read_by_a_process_that_is_kept(tmp_path):
    disk = RawDisk(tmp_path / "raw", SIZE)
    for _ in range(2):
        begun = time.monotonic()
        disk.begin("write")
        written = disk.wait()
        assert disk.done() is written
        assert begun < written.at < time.monotonic()
        assert 0 < written.seconds <= written.at - begun
        assert SIZE <= (tmp_path / "raw").stat().st_size < SIZE + 4096
    disk.begin("read")
    assert disk.wait().seconds > 0
    disk.close()
    assert list(tmp_path.iterdir()) == []


def test_raw_bytes_that_can_not_be_moved_are_an_error_with_its_cause(tmp_path):
    disk = RawDisk(tmp_path / "gone" / "raw", SIZE)
    disk.begin("write")
    with pytest.raises(OSError, match="No such file"):
        disk.wait()
    disk.close()


def test_the_floor_copies_what_was_there_at_the_save_and_writes_as_many_bytes(tmp_path):
    work = small()
    floor = Floor()
    floor.prepare(work, tmp_path)
    then = [tensor.clone() for tensor in work.tensors().values()]
    begun = time.monotonic()
    floor.save(0)
    work.forward_backward(4)
    floor.before_step()
    work.update()
    assert all(map(torch.equal, floor._copier.copies, then))
    assert not all(map(torch.equal, floor._copier.copies, work.tensors().values()))
    assert begun < floor.wait_durable() < time.monotonic()
    assert floor.durable_at() == floor.wait_durable()
    assert (tmp_path / "raw").stat().st_size >= work.nbytes
    floor.discard(0)
    assert list(tmp_path.iterdir()) == []
    floor.close()


@CUDA
@pytest.mark.cuda
def test_on_cuda_a_raw_copy_is_ordered_before_the_step_that_changes_the_state():
    work = small("cuda")
    copier = Copier(work)
    work.forward_backward(64)
    then = [tensor.cpu() for tensor in work.tensors().values()]
    copier.begin()
    copier.join()
    work.update()
    assert copier.wait() > 0
    assert all(map(torch.equal, copier.copies, then))
    copier.close()
