"""The order in which a save becomes durable, seen at the system calls of this very process."""

import os
import threading
from pathlib import Path

import pytest

from ckpt.layout import part_tensors
from ckpt.store import open_store
from ckpt.writer.options import WriterOptions
from ckpt.writer.persist import Persister
from ckpt.writer.save import Save, VoidError
from ckpt.writer.throttle import Throttle
from tests.ckpt.writing import MIB, Arena, attempt_of, fill, layout_of, part_of

RUN_ID = "0" * 32


@pytest.fixture
def save():
    layout = layout_of(20)
    with Arena.create(layout.size) as arena:
        tensors = part_tensors([placed.slice for placed in layout.placed], layout)
        yield Save(attempt_of(1), arena, layout.size, tensors)


@pytest.fixture
def calls(monkeypatch):
    """Every sync, link and write of the process, as (call, what)."""
    seen: list[tuple[str, str]] = []
    fsync, link, pwrite = os.fsync, os.link, os.pwrite

    def spy_fsync(fd) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def spy_link(source, target, **kwargs) -> None:
        link(source, target, **kwargs)
        seen.append(("link", str(target)))

    def spy_pwrite(fd, data, offset) -> int:
        seen.append(("pwrite", os.readlink(f"/proc/self/fd/{fd}")))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "link", spy_link)
    monkeypatch.setattr(os, "pwrite", spy_pwrite)
    return seen


def staged(save: Save) -> None:
    save.arena.watermark = fill(save.arena, layout_of(20), 1)


@pytest.mark.parametrize("direct", [True, False])
def test_shard_folder_and_part_are_synced_in_this_order(tmp_path, save, calls, direct):
    persister = Persister(open_store(tmp_path), 0, WriterOptions(direct=direct), print)
    staged(save)
    save.seal(part_of(RUN_ID, save.attempt))
    persister.persist(save)
    folder = str(tmp_path / save.attempt)
    shard, part = f"{folder}/rank-00000.safetensors", f"{folder}/rank-00000.json"
    last_write = max(i for i, call in enumerate(calls) if call == ("pwrite", shard))
    shard_synced = calls.index(("fsync", shard))
    folder_synced = calls.index(("fsync", folder), shard_synced)
    part_linked = calls.index(("link", part))
    part_written = next(
        i for i, (call, what) in enumerate(calls) if call == "fsync" and what.startswith(f"{folder}/.tmp-")
    )
    folder_synced_again = calls.index(("fsync", folder), part_linked)
    order = [last_write, shard_synced, folder_synced, part_written, part_linked, folder_synced_again]
    assert order == sorted(order)
    assert ("fsync", str(tmp_path)) in calls[:last_write], "the attempt's own folder"


def test_no_part_appears_before_the_seal_and_none_after_a_stop(tmp_path, save):
    persister = Persister(open_store(tmp_path), 0, WriterOptions(), print)
    outcome: list[BaseException] = []

    def persist() -> None:
        try:
            persister.persist(save)
        except BaseException as error:
            outcome.append(error)

    staged(save)
    thread = threading.Thread(target=persist)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not outcome
    save.stop("the guard found a torn tensor")
    thread.join(60)
    assert isinstance(outcome[0], VoidError)
    save.seal(part_of(RUN_ID, save.attempt))
    with pytest.raises(VoidError):
        persister.persist(save)
    assert not list(Path(tmp_path).rglob("*.json"))


def test_a_part_written_twice_is_one_part_and_another_ones_is_refused(tmp_path, save):
    persister = Persister(open_store(tmp_path), 0, WriterOptions(), print)
    persister.store.make_dir(save.attempt)
    persister._create_part(save, b"one")
    persister._create_part(save, b"one")
    with pytest.raises(Exception, match="is not this save's"):
        persister._create_part(save, b"two")


def test_the_throttle_books_no_more_than_its_rate():
    throttle = Throttle(100 * MIB, burst=10 * MIB)
    waits = [throttle.reserve(10 * MIB) for _ in range(11)]
    assert waits[0] == 0.0
    assert 0.9 < waits[-1] <= 1.0
    assert Throttle(None, burst=1).reserve(1 << 40) == 0.0
