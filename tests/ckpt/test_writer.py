import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

import ckpt.writer.client
from ckpt.arena import Arena
from ckpt.discover import latest_valid
from ckpt.errors import StateError, StorageError
from ckpt.launches import begin_launch
from ckpt.layout import plan_shard
from ckpt.manifest import parse_part
from ckpt.run import open_run
from ckpt.verification import verify
from ckpt.writer.client import WriterClient
from ckpt.writer.events import Committed, Durable, Exited, Failed, FencedOff, Pruned
from ckpt.writer.messages import pack
from ckpt.writer.options import WriterOptions
from tests.ckpt.writing import (
    MIB,
    PATIENCE_S,
    Saver,
    attempt_of,
    files_in,
    gone,
    new_run,
    part_of,
    wait_until,
)


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "a run = [1] ~ü")


@pytest.fixture
def saver(run):
    made = Saver(run)
    yield made
    made.close()


def test_a_save_becomes_durable_then_committed_and_verifies_bit_for_bit(run, saver):
    attempt, durable = saver.save(1)
    assert isinstance(durable, Durable)
    assert (durable.attempt, durable.bytes) == (attempt, saver.layout.size)
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)
    assert latest_valid(run.uri) is None
    committed = saver.commit(attempt)
    assert isinstance(committed, Committed) and committed.attempt == attempt
    found = latest_valid(run.uri, verify="full")
    assert found is not None and found.attempt == attempt
    assert found.manifest.config == {"betas": (0.9, 0.99)}
    assert found.manifest.costs["persist_s"] > 0
    assert verify(found).ok


def test_the_shard_is_a_valid_safetensors_file(run, saver):
    attempt, _ = saver.save(3)
    with safe_open(Path(run.uri, attempt, "rank-00000.safetensors"), "np") as shard:
        big = shard.get_tensor("model.big0")
        tail = shard.get_tensor("model.tail0")
    start = len(saver.layout.header)
    assert big.tobytes() + tail.tobytes() == bytes(saver.arena.buffer[start:])


def test_every_save_holds_the_bytes_of_its_own_moment(run, saver):
    before = []
    for step in range(1, 5):
        attempt, _ = saver.save(step)
        saver.commit(attempt)
        before.append((attempt, bytes(saver.arena.buffer)))
    assert len({data for _, data in before}) == 4
    for attempt, data in before:
        assert saver.bytes_of(attempt) == data


def test_the_staged_prefix_is_written_before_the_rest_is_staged(run):
    saver = Saver(run, mib=40)
    attempt = saver.begin(1)
    saver.stage(1, 20 * MIB)
    path = Path(run.uri, attempt, "rank-00000.safetensors")
    wait_until(
        lambda: path.exists() and any(path.read_bytes()[5 * MIB : 16 * MIB]), "the first block is in the file"
    )
    assert not any(path.read_bytes()[20 * MIB :])
    saver.stage(1)
    saver.seal(attempt)
    assert isinstance(saver.event(), Durable)
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)
    saver.close()


def test_a_shard_is_not_durable_before_it_is_sealed(run, saver):
    attempt = saver.begin(1)
    saver.stage(1)
    path = Path(run.uri, attempt, "rank-00000.safetensors")
    wait_until(
        lambda: path.exists() and path.read_bytes() == bytes(saver.arena.buffer), "all bytes are in the file"
    )
    assert saver.client.next_event(0.3) is None
    assert files_in(run) == {f"{attempt}/rank-00000.safetensors"}
    saver.seal(attempt)
    assert isinstance(saver.event(), Durable)


@pytest.mark.parametrize("sealed", [False, True])
def test_an_aborted_save_leaves_nothing_and_the_next_one_works(run, sealed):
    saver = Saver(run, bandwidth_limit=32 * MIB)
    attempt = saver.begin(1)
    saver.stage(1)
    if sealed:
        saver.seal(attempt)
    wait_until(lambda: files_in(run), "the attempt has begun to be written")
    saver.client.abort("the guard found a torn tensor")
    wait_until(lambda: not Path(run.uri, attempt).exists(), "the aborted attempt is removed")
    second, event = saver.save(2)
    assert isinstance(event, Durable) and event.attempt == second
    saver.close()


def test_a_durable_attempt_can_be_aborted_but_a_committed_one_never(run, saver):
    kept, _ = saver.save(1)
    saver.commit(kept)
    dropped, _ = saver.save(2)
    saver.client.abort("another rank failed", dropped)
    saver.client.abort("by mistake", kept)
    third, _ = saver.save(3)
    assert not Path(run.uri, dropped).exists()
    assert latest_valid(run.uri).attempt == kept
    assert third


def test_direct_and_buffered_writes_give_the_same_files(run):
    shards = []
    for step, direct in ((1, True), (2, False)):
        saver = Saver(run, direct=direct)
        attempt = saver.begin(step)
        saver.stage(7)
        saver.seal(attempt)
        assert isinstance(saver.event(), Durable)
        shards.append(saver.bytes_of(attempt))
        saver.close()
    assert shards[0] == shards[1]


def test_an_odd_last_page_and_a_header_only_shard_are_exact(run, saver):
    layout = plan_shard([])
    attempt = attempt_of(9)
    saver.client.begin(attempt, layout)
    saver.client.seal(part_of(run.id, attempt))
    assert isinstance(saver.event(), Durable)
    assert saver.bytes_of(attempt) == layout.header
    assert isinstance(saver.commit(attempt), Committed)


@pytest.mark.parametrize("digest", ["xxh3-128", "blake3"])
def test_the_part_carries_the_digests_asked_for(run, digest):
    saver = Saver(run, digest=digest)
    attempt, _ = saver.save(1)
    part = parse_part(Path(run.uri, attempt, "rank-00000.json").read_bytes())
    assert part["file"]["digest_kind"] == digest
    assert len(part["file"]["chunks"]) == 2
    saver.commit(attempt)
    assert verify(latest_valid(run.uri)).ok
    saver.close()


def test_a_smaller_layout_reuses_the_arena(run, saver):
    saver.save(1)
    big, saver.layout = saver.layout, plan_shard([placed.slice for placed in saver.layout.placed[1:]])
    assert saver.layout.size < big.size
    attempt = attempt_of(2)
    saver.client.begin(attempt, saver.layout, layout_changed=True)
    saver.stage(2)
    saver.seal(attempt)
    assert isinstance(saver.event(), Durable)
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer[: saver.layout.size])


def test_a_new_arena_takes_the_place_of_the_old_one(run, saver):
    saver.save(1)
    with Arena.create(saver.layout.size) as arena:
        saver.client.attach(arena)
        old, saver.arena = saver.arena, arena
        old.close()
        attempt, event = saver.save(2)
        assert isinstance(event, Durable)
        assert saver.bytes_of(attempt) == bytes(arena.buffer)


def test_the_bandwidth_cap_holds(run):
    saver = Saver(run, mib=24, bandwidth_limit=16 * MIB)
    begun = time.monotonic()
    saver.save(1)
    assert time.monotonic() - begun > 22 / 16
    saver.close()


def test_pruning_is_done_in_the_background_and_reported(run, saver):
    attempts = [saver.save(step)[0] for step in (1, 2)]
    for attempt in attempts:
        assert isinstance(saver.commit(attempt), Committed)
    saver.client.prune(attempts[:1])
    event = saver.event()
    assert event == Pruned(attempts[:1], [])
    assert not Path(run.uri, attempts[0]).exists()
    assert latest_valid(run.uri).attempt == attempts[1]


def test_a_fenced_launch_commits_nothing_more(run, saver):
    attempt, _ = saver.save(1)
    newer = open_run(run.uri, takeover=True)
    begin_launch(newer, owner="tests", config=None, say=print)
    saver.client.commit(attempt, 1)
    event = saver.event()
    assert isinstance(event, FencedOff) and event.attempt == attempt and "launch 2" in event.by


def test_a_commit_without_all_parts_fails_and_says_which(run, saver):
    attempt, _ = saver.save(1)
    event_of = saver.client
    event_of.commit(attempt, 2)
    event = saver.event()
    assert isinstance(event, Failed) and event.phase == "commit"
    assert latest_valid(run.uri) is None


def test_closing_finishes_what_is_sealed_and_removes_what_is_not(run):
    saver = Saver(run, mib=24, bandwidth_limit=24 * MIB)
    attempt = saver.begin(1)
    saver.stage(1)
    saver.seal(attempt)
    assert saver.client.close(PATIENCE_S)
    assert isinstance(saver.event(), Durable)
    assert saver.event() == Exited("closed")
    wait_until(lambda: gone(saver.client.pid), "the writer process has ended")
    saver.start()
    unsealed = saver.begin(2)
    saver.stage(2)
    assert saver.client.close(PATIENCE_S)
    assert not Path(run.uri, unsealed).exists()


def test_closing_in_too_short_a_time_says_so_and_the_writer_goes_on(run):
    saver = Saver(run, mib=24, bandwidth_limit=16 * MIB)
    attempt = saver.begin(1)
    saver.stage(1)
    saver.seal(attempt)
    assert not saver.client.close(0.05)
    wait_until(lambda: latest_valid(run.uri) is not None, "the writer has committed by itself")
    wait_until(lambda: gone(saver.client.pid), "the writer process has ended")
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)


def test_the_writer_imports_no_torch_and_is_up_at_once(run):
    modules = "ckpt.writer.lead, ckpt.writer.serve"
    script = f"import sys, {modules}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    taken = []
    for _ in range(3):
        begun = time.monotonic()
        client = WriterClient.start(run.uri, 1, 1)
        taken.append(time.monotonic() - begun)
        assert client.close(PATIENCE_S)
    assert min(taken) < 1.0


def test_the_writer_works_at_low_priority_until_somebody_waits(run, monkeypatch):
    monkeypatch.setenv("CKPT_FAULTS", '[{"match": "writer:pwrite:", "do": "delay", "seconds": 0.5}]')
    saver = Saver(run, mib=120)
    attempt = saver.begin(1)
    saver.stage(1)
    threads = Path(f"/proc/{saver.client.pid}/task")

    def nices() -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in threads.iterdir()]

    wait_until(lambda: sum(nice > 0 for nice in nices()) == 2, "two threads work at low priority")
    saver.client.hurry()
    wait_until(lambda: not any(nice > 0 for nice in nices()), "no thread works at low priority")
    with open(Path(run.uri, attempt, "rank-00000.safetensors"), "rb") as shard:
        shard.seek(-MIB, os.SEEK_END)
        assert not any(shard.read()), "the shard was finished before anybody hurried"
    saver.seal(attempt)
    assert isinstance(saver.event(), Durable)
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)
    saver.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_threads_and_descriptors_do_not_grow_with_saves(run, threads):
    with closing(Saver(run, threads=threads)) as saver:
        costs = [_cost_after(saver, step) for step in range(1, 16)]
    # A second buffer is filled for the first time whenever both threads happen to be at work at once.
    later_kib = (threads - 1) * saver.options.block >> 10
    assert costs[-1][0] - costs[2][0] < 4096 + later_kib
    assert costs[-1][1] <= costs[2][1] + 2
    assert costs[-1][2] <= costs[2][2] + 2


def _cost_after(saver: Saver, step: int) -> tuple[int, int, int]:
    """KiB of private memory, threads and descriptors of the writer, after one more save or a failed one."""
    attempt, event = saver.save(step)
    if step % 3:
        assert isinstance(event, Durable)
        saver.commit(attempt)
    else:
        saver.client.abort("every third fails", attempt)
    process = psutil.Process(saver.client.pid)
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return anonymous, process.num_threads(), process.num_fds()


def test_a_dead_writer_is_noticed_named_and_replaced(run, saver):
    attempt = saver.begin(1)
    saver.stage(1, 4 * MIB)
    wait_until(lambda: files_in(run), "the attempt has begun to be written")
    os.kill(saver.client.pid, signal.SIGKILL)
    event = saver.event()
    assert isinstance(event, Exited) and "killed" in event.reason
    assert not saver.client.alive
    with pytest.raises(StorageError, match="start another one"):
        saver.begin(2)
    saver.client.abort("its writer died")
    saver.start()
    saver.client.abort("its writer died", attempt)
    second, event = saver.save(2)
    assert isinstance(event, Durable)
    assert isinstance(saver.commit(second), Committed)
    assert not Path(run.uri, attempt).exists()


def test_a_frozen_writer_does_not_hang_its_trainer(run, monkeypatch):
    monkeypatch.setattr(ckpt.writer.client, "_SEND_S", 1)
    saver = Saver(run, mib=1)
    os.kill(saver.client.pid, signal.SIGSTOP)
    with pytest.raises(StorageError, match="start another one"):
        saver.client.prune(["x" * MIB] * 8)
    os.kill(saver.client.pid, signal.SIGCONT)
    wait_until(lambda: gone(saver.client.pid), "the writer process has ended")
    saver.arena.close()


def test_a_writer_that_cannot_start_says_why(run, monkeypatch):
    monkeypatch.setenv("CKPT_FAULTS", "{nonsense")
    with pytest.raises(StorageError, match="CKPT_FAULTS is not JSON"):
        WriterClient.start(run.uri, 0, 1)
    monkeypatch.delenv("CKPT_FAULTS")
    monkeypatch.setattr(ckpt.writer.client.sys, "executable", "/nonexistent/python")
    with pytest.raises(StorageError, match="nonexistent"):
        WriterClient.start(run.uri, 0, 1)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("!I", 0xFFFFFFFF),
        struct.pack("!I", 4) + b"nope",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 16) + b'{"kind":"begin"}',
        struct.pack("!I", 18) + b'{"kind":"unknown"}',
        struct.pack("!I", 35) + b'{"kind":"attach","slot":0,"size":1} ',
    ],
)
def test_what_is_not_a_message_ends_the_writer_with_the_reason(run, saver, garbage):
    saver.client._sock.sendall(garbage)
    event = saver.event()
    assert isinstance(event, Exited)
    assert "message" in event.reason
    wait_until(lambda: gone(saver.client.pid), "the writer process has ended")


def test_a_bug_in_the_writer_ends_it_with_its_traceback():
    script = "import signal; from ckpt.writer.lane import Lane; Lane('x').add(lambda: 1 / 0); signal.pause()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("name", ["launches", "../elsewhere", "step-1-1-a/..", ""])
def test_only_attempts_can_be_begun_or_removed(run, saver, name):
    saver.client._sock.sendall(pack("abort", attempt=name, reason="nonsense"))
    event = saver.event()
    assert isinstance(event, Exited) and "not an attempt" in event.reason
    assert Path(run.uri, "launches").exists()


def test_starting_and_closing_writers_leaks_no_descriptors(run):
    counts = []
    for _ in range(4):
        client = WriterClient.start(run.uri, 1, 1)
        assert client.close(PATIENCE_S)
        client._reader.join(PATIENCE_S)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[0]


def test_a_writer_that_nobody_greets_ends(run):
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt.writer", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
    ours.close()
    # Its standard output ends when the detached process has ended.
    process.communicate(timeout=PATIENCE_S)


def test_wrong_options_are_refused_before_any_process_starts():
    for wrong in (
        {"digest": "md5"},
        {"threads": 0},
        {"block": 1000},
        {"bandwidth_limit": 10},
        {"posthumous_s": -1},
    ):
        with pytest.raises(StateError):
            WriterOptions(**wrong)


def test_the_heart_beats_by_itself_with_the_step_told(run, saver):
    from ckpt.liveness import read_beat

    wait_until(lambda: read_beat(run.store, 1).get("counter", 0) >= 2, "the second beat")
    saver.client.beat_phase(17)
    wait_until(lambda: read_beat(run.store, 1).get("step") == 17, "the step in the beat")
    assert read_beat(run.store, 1)["phase"] == "training"
    assert read_beat(run.store, 1)["pid"] == saver.client.pid


def test_writing_keeps_up_with_the_disk(run):
    """A floor that only a serious fault goes under: a tenth of what the same bytes take with plain writes."""
    saver = Saver(run, mib=128)
    saver.stage(1)
    saver.save(1)
    data = bytes(saver.arena.buffer)
    begun = time.monotonic()
    with open(Path(run.uri, "plain"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    plain = time.monotonic() - begun
    attempt = saver.begin(2)
    begun = time.monotonic()
    saver.seal(attempt)
    assert isinstance(saver.event(), Durable)
    assert time.monotonic() - begun < 10 * plain + 1.0
    saver.close()


def test_messages_are_heard_from_several_threads(run, saver):
    import threading

    attempt = saver.begin(1)
    saver.stage(1)
    threads = [
        threading.Thread(target=lambda: [saver.client.beat_phase(step) for step in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    saver.seal(attempt)
    for thread in threads:
        thread.join()
    assert isinstance(saver.event(), Durable)


def test_a_hello_of_another_protocol_is_refused(run):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt.writer", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        body = b'{"kind":"hello","protocol":999}'
        ours.sendall(struct.pack("!I", len(body)) + body)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert b"expected a hello of protocol" in errors
