import ctypes
import os
import subprocess
import sys

import pytest

from ckpt.arena import PAGE, Arena, pages


def address(arena: Arena) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(arena._map))


def test_the_buffer_is_writable_page_aligned_and_of_the_asked_size():
    with Arena.create(3 * PAGE + 5) as arena:
        assert len(arena.buffer) == arena.size == 3 * PAGE + 5
        assert not arena.buffer.readonly
        assert len(arena.padded) == 4 * PAGE
        assert address(arena) % PAGE == 0


def test_another_process_sees_bytes_and_watermark_and_cannot_change_them():
    with Arena.create(PAGE + 1) as arena:
        arena.buffer[:5] = b"hello"
        arena.watermark = 5
        with Arena.map_for_reading(os.dup(arena.fd), arena.size) as reader:
            assert (bytes(reader.buffer[:5]), reader.watermark) == (b"hello", 5)
            assert reader.buffer.readonly
            arena.watermark = PAGE + 1
            assert reader.watermark == PAGE + 1


def test_the_watermark_is_not_part_of_the_shard():
    with Arena.create(2 * PAGE) as arena:
        arena.watermark = 2**40
        assert not any(arena.buffer)
        arena.buffer[:] = b"\xff" * len(arena.buffer)
        assert arena.watermark == 2**40


def test_touching_keeps_what_is_staged_and_backs_every_page():
    with Arena.create(9 * 1024 * PAGE) as arena:
        arena.buffer[:4] = b"kept"
        arena.touch().result(timeout=60)
        assert bytes(arena.buffer[:4]) == b"kept"
        assert os.fstat(arena.fd).st_blocks * 512 >= pages(arena.size)


def test_closing_while_touching_is_safe():
    for _ in range(5):
        arena = Arena.create(1 << 30)
        arena.touch()
        arena.close()
        assert arena.fd == -1


def test_closing_twice_and_with_a_view_held_is_safe():
    arena = Arena.create(PAGE)
    view = arena.buffer
    view[:2] = b"ok"
    arena.close()
    arena.close()
    assert bytes(view[:2]) == b"ok"


def test_a_descriptor_of_another_size_is_refused():
    with Arena.create(PAGE) as arena, pytest.raises(ValueError, match="not an arena"):
        Arena.map_for_reading(arena.fd, 3 * PAGE)


def test_a_size_that_makes_no_sense_is_refused():
    for size in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            Arena.create(size)


def test_the_arena_cannot_be_shrunk_under_its_reader():
    with Arena.create(PAGE) as arena, pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_the_arena_needs_no_torch():
    script = "import sys, ckpt.arena; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
