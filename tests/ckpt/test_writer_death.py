"""Who dies, when, and what is left of a save."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import psutil
import pytest

from ckpt.discover import latest_valid
from ckpt.errors import StorageError
from ckpt.liveness import read_beat
from ckpt.verification import verify
from ckpt.writer.events import Committed, Durable, Exited, Failed
from tests.ckpt.writing import MIB, PATIENCE_S, Saver, Trainer, files_in, gone, new_run, wait_until


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "run")


@pytest.fixture
def trainer(run):
    made: list[Trainer] = []

    def make(**kwargs) -> Trainer:
        made.append(Trainer(run, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.clean_up()


def kill_alone(trainer: Trainer) -> None:
    os.kill(trainer.pid, signal.SIGKILL)


def kill_group(trainer: Trainer) -> None:
    os.killpg(os.getpgid(trainer.pid), signal.SIGKILL)


def kill_session(trainer: Trainer) -> None:
    session = os.getsid(trainer.pid)
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                process.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def kill_tree(trainer: Trainer) -> None:
    root = psutil.Process(trainer.pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()


@pytest.mark.parametrize("kill", [kill_alone, kill_group, kill_session, kill_tree])
def test_a_sealed_save_is_finished_and_committed_whatever_kills_the_trainer(run, trainer, kill):
    victim = trainer(mib=24, bandwidth_limit=24 * MIB)
    attempt = victim.do("begin", 1)["attempt"]
    victim.do("stage", 1.0)
    victim.do("seal")
    wait_until(lambda: files_in(run), "the attempt has begun to be written")
    kill(victim)
    victim.process.wait(PATIENCE_S)
    assert latest_valid(run.uri) is None, "it was durable before the kill: nothing is tested"
    wait_until(lambda: read_beat(run.store, 1).get("phase") == "draining", "the beat says it drains")
    wait_until(lambda: gone(victim.writer), "the orphaned writer has ended")
    found = latest_valid(run.uri, verify="full")
    assert found is not None and found.attempt == attempt
    log = Path(run.uri, "logs/00001/writer-00000.log").read_text()
    assert "durable" in log and "committed" in log


@pytest.mark.parametrize(
    ("commands", "committed"),
    [
        ([], False),
        ([("begin", 1)], False),
        ([("begin", 1), ("stage", 0.5)], False),
        ([("begin", 1), ("stage", 1.0)], False),
        ([("begin", 1), ("stage", 1.0), ("seal",)], True),
        ([("begin", 1), ("stage", 1.0), ("seal",), ("event",)], True),
        ([("begin", 1), ("stage", 1.0), ("seal",), ("event",), ("commit",)], True),
        ([("begin", 1), ("stage", 1.0), ("seal",), ("event",), ("commit",), ("event",)], True),
        ([("save", 7), ("begin", 8), ("stage", 0.7)], True),
    ],
)
def test_only_a_sealed_save_outlives_its_trainer(run, trainer, commands, committed):
    victim = trainer(mib=20)
    for command in commands:
        victim.do(*command)
    victim.kill()
    wait_until(lambda: gone(victim.writer), "the orphaned writer has ended")
    found = latest_valid(run.uri, verify="full")
    assert (found is not None) == committed
    whole = {"manifest.json", "rank-00000.json", "rank-00000.safetensors"}
    assert files_in(run) == ({f"{found.attempt}/{name}" for name in whole} if found else set())
    assert [path.name for path in Path(run.uri).glob("step-*")] == ([found.attempt] if found else [])


def test_children_that_hold_the_trainers_descriptors_do_not_hide_its_death(run, trainer):
    victim = trainer(mib=20)
    child = victim.do("fork")["child"]
    victim.do("begin", 1)
    victim.do("stage", 1.0)
    victim.do("seal")
    victim.kill()
    try:
        wait_until(lambda: gone(victim.writer), "the orphaned writer has ended")
        assert not gone(child)
        assert latest_valid(run.uri) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_signals_meant_for_the_trainer_do_not_end_the_writer(run, trainer):
    victim = trainer(mib=8)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(victim.writer, number)
    assert victim.do("save", 1)["event"] == "Durable"
    assert not gone(victim.writer)


def test_two_orphaned_ranks_commit_together(run, trainer):
    victims = [trainer(rank=rank, world_size=2, mib=16, bandwidth_limit=24 * MIB) for rank in (0, 1)]
    for victim in victims:
        victim.do("begin", 1)
        victim.do("stage", 1.0)
        victim.do("seal")
    for victim in victims:
        victim.kill()
    for victim in victims:
        wait_until(lambda victim=victim: gone(victim.writer), "the orphaned writer has ended")
    found = latest_valid(run.uri, verify="full")
    assert found is not None and len(found.manifest.files) == 2


def test_a_checkpoint_with_an_unsealed_rank_is_never_committed(run, trainer):
    victims = [trainer(rank=rank, world_size=2, mib=4, posthumous_s=1.5) for rank in (0, 1)]
    for victim in victims:
        victim.do("begin", 1)
        victim.do("stage", 1.0)
    victims[0].do("seal")
    for victim in victims:
        victim.kill()
    for victim in victims:
        wait_until(lambda victim=victim: gone(victim.writer), "the orphaned writer has ended")
    assert latest_valid(run.uri) is None
    assert not [name for name in files_in(run) if "rank-00001" in name]


def test_only_rank_0_takes_back_what_is_durable(run):
    """Another rank that did so could pull its shard from under a commit in progress."""
    savers = [Saver(run, mib=4, rank=rank, world_size=2) for rank in (0, 1)]
    for saver in savers:
        attempt, event = saver.save(1)
        assert isinstance(event, Durable)
    whole = files_in(run)
    savers[1].client.abort("rank 0 does not answer")
    assert savers[1].save(2)[0] != attempt  # behind the abort: it has been dealt with
    assert whole <= files_in(run)
    savers[0].client.abort("rank 1 gave up")
    wait_until(lambda: not Path(run.uri, attempt).exists(), "rank 0 has removed the void attempt")
    for saver in savers:
        saver.close()


def test_an_orphaned_writer_does_not_linger_over_a_slow_storage(run, trainer):
    victim = trainer(mib=24, bandwidth_limit=2 * MIB, posthumous_s=0.5)
    victim.do("begin", 1)
    victim.do("stage", 1.0)
    victim.do("seal")
    wait_until(lambda: files_in(run), "the attempt has begun to be written")
    victim.kill()
    wait_until(lambda: gone(victim.writer), "the orphaned writer has ended", timeout=11.5)
    assert files_in(run) == set()


def test_an_orphaned_writer_leaves_even_when_the_storage_hangs(run, trainer):
    hang = {"match": "writer:pwrite:", "nth": 1, "do": "delay", "seconds": 3600}
    victim = trainer(mib=4, posthumous_s=0.5, faults=[hang])
    victim.do("begin", 1)
    victim.do("stage", 1.0)
    victim.do("seal")
    victim.kill()
    wait_until(lambda: gone(victim.writer), "the orphaned writer has ended", timeout=30)
    assert latest_valid(run.uri) is None


SHARD, PART, MANIFEST = (
    ".*000002-.*rank-00000.safetensors$",
    ".*000002-.*rank-00000.json$",
    ".*000002-.*manifest",
)
BEFORE_COMMIT = [
    "mkdir:.*000002-",
    f"open:{SHARD}",
    f"pwrite:{SHARD}",
    f"ftruncate:{SHARD}",
    f"fsync:{SHARD}",
    "fsync-folder:.*000002-",
    f"create:{PART}",
    f"write:{PART}",
    f"fsync:{PART}",
    f"link:{PART}",
    "fsync_dir:.*000002-",
    f"create:{MANIFEST}",
    f"write:{MANIFEST}",
    f"fsync:{MANIFEST}",
    f"link:{MANIFEST}",
]


AFTER_COMMIT = "fsync_dir:.*000002-", 2


@pytest.mark.parametrize(("place", "nth"), [*((place, 1) for place in BEFORE_COMMIT), AFTER_COMMIT])
def test_a_killed_save_is_never_taken_for_a_checkpoint(run, monkeypatch, place, nth):
    monkeypatch.setenv("CKPT_FAULTS", f'[{{"match": "writer:{place}", "nth": {nth}, "do": "kill"}}]')
    saver = Saver(run, mib=20)
    first, _ = saver.save(1)
    assert isinstance(saver.commit(first), Committed)
    data = saver.bytes_of(first)
    second = saver.begin(2)
    saver.stage(2)
    with contextlib.suppress(StorageError):  # it may be dead by now
        saver.seal(second)
    event = saver.event()
    if isinstance(event, Durable):
        event = saver.commit(second)
    assert isinstance(event, Exited), "the fault did not strike"
    found = latest_valid(run.uri, verify="full")
    assert found.attempt == (second if (place, nth) == AFTER_COMMIT else first)
    assert verify(found).ok
    assert saver.bytes_of(first) == data
    monkeypatch.delenv("CKPT_FAULTS")
    saver.start()
    third, event = saver.save(3)
    assert isinstance(event, Durable) and isinstance(saver.commit(third), Committed)
    assert latest_valid(run.uri).attempt == third
    saver.close()


@pytest.mark.parametrize(
    "place",
    [
        "open:.*safetensors",
        "pwrite:",
        "ftruncate:",
        "fsync:.*safetensors",
        "fsync-folder:",
        "create:.*rank",
        "fsync:.*rank.*json",
    ],
)
def test_a_failed_save_leaves_no_files_names_its_cause_and_the_next_one_works(run, monkeypatch, place):
    monkeypatch.setenv("CKPT_FAULTS", f'[{{"match": "writer:{place}", "nth": 2, "do": "raise", "errno": 5}}]')
    saver = Saver(run, mib=15)
    first, _ = saver.save(1)
    saver.commit(first)
    before = files_in(run)
    second, event = saver.save(2)
    assert isinstance(event, Failed), event
    assert (event.attempt, event.errno, event.phase) == (second, 5, "persist")
    assert "Input/output error" in event.error and "rank 0" in event.error
    assert files_in(run) == before
    assert not Path(run.uri, second).exists()
    third, event = saver.save(3)
    assert isinstance(event, Durable)
    assert isinstance(saver.commit(third), Committed)
    saver.close()


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("open:.*safetensors", errno.ESTALE),
        ("pwrite:", errno.EINTR),
        ("pwrite:", errno.EAGAIN),
        ("pwrite:", errno.ETIMEDOUT),
        ("fsync:.*safetensors", errno.ETIMEDOUT),
        ("create:.*rank", errno.ESTALE),
        ("create:.*manifest", errno.ECONNRESET),
    ],
)
def test_a_transient_error_is_retried_from_the_first_byte(run, monkeypatch, place, code):
    monkeypatch.setenv(
        "CKPT_FAULTS", f'[{{"match": "writer:{place}", "nth": 1, "do": "raise", "errno": {code}}}]'
    )
    saver = Saver(run, mib=20)
    attempt, event = saver.save(1)
    assert isinstance(event, Durable)
    assert isinstance(saver.commit(attempt), Committed)
    assert verify(latest_valid(run.uri)).ok
    assert saver.bytes_of(attempt) == bytes(saver.arena.buffer)
    saver.close()


def test_retrying_ends_at_its_deadline_with_the_cause(run, monkeypatch):
    monkeypatch.setenv("CKPT_FAULTS", '[{"match": "writer:pwrite:", "do": "raise", "errno": 110}]')
    saver = Saver(run, mib=2, retry_s=0.5)
    _, event = saver.save(1)
    assert isinstance(event, Failed) and event.errno == 110
    assert files_in(run) == set()
    saver.close()


def test_bytes_lost_on_their_way_to_the_disk_void_the_save(run, monkeypatch):
    monkeypatch.setenv("CKPT_FAULTS", '[{"match": "writer:fsync:.*safetensors", "nth": 1, "do": "cut"}]')
    saver = Saver(run, mib=4)
    _, event = saver.save(1)
    assert isinstance(event, Failed) and "bytes after its fsync" in event.error
    assert files_in(run) == set()
    saver.close()


def test_256_descriptors_are_enough(run, trainer):
    victim = trainer(mib=2, threads=16, shell="ulimit -n 256")
    for step in range(1, 13):
        assert victim.do("save", step)["committed"].startswith("Committed")
    assert psutil.Process(victim.writer).num_fds() < 40
