import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ckpt import launches, liveness, names
from ckpt.discover import candidates
from ckpt.errors import Fenced, RunBusy, StateError, StorageError
from ckpt.fence import assert_launched
from ckpt.launches import assert_not_fenced, begin_launch, list_launches, record_end, record_parent
from ckpt.run import open_run
from tests.ckpt import making

DEADLINE_S = 60


@pytest.fixture
def run(tmp_path):
    return making.run_at(tmp_path / "run")


def begin(run, owner="", **more):
    return begin_launch(run, owner=owner, config=None, say=more.pop("say", lambda _: None), **more)


@contextlib.contextmanager
def python(code, *args, **env):
    """A process running `code`; ended with SIGKILL if it hasn't ended by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


HOLDER = """
import sys
from ckpt.launches import begin_launch
from ckpt.run import open_run
run = open_run(sys.argv[1])
try:
    launch = begin_launch(run, owner=sys.argv[2], config={"who": sys.argv[2]}, say=lambda t: None)
except Exception as error:
    print(type(error).__name__, error, flush=True)
else:
    print("began", launch.number, flush=True)
sys.stdin.read()
"""


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_launch_records_who_it_is(run):
    made = begin_launch(
        run, owner="o", config={"lr": 0.1, "deep": {"a": None}}, overrides=["lr=0.1"], say=print
    )
    info = list_launches(run.store)[0].info
    assert (
        made.number == 1 and info["pid"] == os.getpid() and info["run_id"] == run.id and info["owner"] == "o"
    )
    assert info["config"] == {"lr": 0.1, "deep": {"a": None}} and info["overrides"] == ["lr=0.1"]
    assert {"host", "boot", "pid_ns", "pid_start", "started"} <= set(info)


def test_p1_of_two_jobs_on_one_run_exactly_one_begins_and_the_other_hears_whose_it_is(tmp_path):
    uri = tmp_path / "run"
    with python(HOLDER, uri, "a") as one, python(HOLDER, uri, "b") as two:
        said = sorted(
            [one.stdout.readline(), two.stdout.readline()], key=lambda line: line.startswith("began")
        )
        winner = one if said[1] in ("began 1\n",) and _info(uri)["owner"] == "a" else two
        assert said[1] == "began 1\n"
        assert said[0].startswith("RunBusy") and f"pid {winner.pid}" in said[0] and "takeover" in said[0]
        assert len(list((uri / "launches").glob("?????.json"))) == 1


def _info(uri):
    return json.loads((uri / "launches" / "00001.json").read_bytes())


def test_p1_of_many_openers_racing_after_a_crash_exactly_one_wins(run):
    making.launch(run, 1, outcome=None, **_dead_here())
    outcomes, barrier = [], threading.Barrier(6)

    def contend():
        barrier.wait(10)
        try:
            outcomes.append(begin(run).number)
        except RunBusy:
            outcomes.append("busy")

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(outcomes, key=str) == [2, "busy", "busy", "busy", "busy", "busy"]


def _dead_here():
    """The identity of a process of this machine that has ended."""
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=60
    )
    return {**liveness.this_machine(), "pid": int(ended.stdout), "pid_start": 1}


def test_a_launch_killed_without_a_word_is_replaced_at_once(tmp_path):
    uri = tmp_path / "run"
    with python(HOLDER, uri, "a") as holder:
        assert holder.stdout.readline() == "began 1\n"
        run = making.run_at(uri)
        with pytest.raises(RunBusy):
            begin(run)
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
        start = time.monotonic()
        assert begin(run).number == 2
        assert time.monotonic() - start < 5


def test_a_killed_process_that_nobody_has_reaped_counts_as_gone(tmp_path):
    with python("import sys; sys.stdin.read()") as process:
        start = liveness.pid_start(process.pid)
        who = {**liveness.this_machine(), "pid": process.pid, "pid_start": start}
        assert liveness.process_alive(who) is True
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: liveness.process_alive(who) is False)


def test_a_reused_pid_is_not_taken_for_the_launch(run):
    me = liveness.identity()
    assert liveness.process_alive(me) is True
    making.launch(run, 1, outcome=None, **{**me, "pid_start": me["pid_start"] - 1})
    assert begin(run).number == 2


def test_a_process_of_another_user_that_proc_hides_is_not_taken_for_gone(monkeypatch):
    def refuse(pid, signal_number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(liveness, "pid_start", lambda pid: None)
    assert liveness.process_alive({**liveness.this_machine(), "pid": 1, "pid_start": 1}) is None


@pytest.mark.parametrize("key", ["host", "boot", "pid_ns"])
def test_a_pid_of_another_machine_boot_or_container_says_nothing(key):
    assert liveness.process_alive({**liveness.identity(), key: "other"}) is None


def test_the_same_process_is_told_that_it_holds_the_run_itself(run):
    begin(run)
    with pytest.raises(RunBusy, match="this very process"):
        begin(run)


def test_an_ended_launch_needs_no_takeover(run):
    first = begin(run)
    assert record_end(run, first, "finished", None, 100)
    assert begin(run).number == 2
    assert [launch.end and launch.end["outcome"] for launch in list_launches(run.store)] == ["finished", None]


def test_takeover_and_restarts_of_the_same_owner_need_no_dead_launch(run):
    assert begin(run, "agent-1").number == 1
    with pytest.raises(RunBusy):
        begin(run, "agent-2")
    assert begin(run, "agent-1").number == 2
    run.takeover = True
    assert begin(run, "agent-2").number == 3


def test_two_launches_without_an_owner_are_not_the_same_owners(run):
    begin(run, "")
    with pytest.raises(RunBusy):
        begin(run, "")


class Beating:
    """Rewrites the beat of a launch elsewhere, as its writer would, until left."""

    def __init__(self, run, number, phase="training", beats=10**9):
        self.stop, self.run, self.number, self.phase, self.left = threading.Event(), run, number, phase, beats
        self.thread = threading.Thread(target=self.work)

    def work(self):
        counter = 0
        while not self.stop.wait(0.05) and self.left:
            counter += 1
            beat = {"host": "elsewhere", "boot": "0", "pid_ns": "0", "pid": 1, "pid_start": 1}
            beat |= {"counter": counter, "step": 77, "phase": self.phase}
            self.run.store.put(
                names.launch_file(self.number, "beat"), json.dumps(beat).encode(), durable=False
            )
            self.left -= 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(DEADLINE_S)


def test_a_launch_elsewhere_lives_while_its_counter_moves(run):
    making.launch(run, 1, outcome=None)
    said = []
    with Beating(run, 1), pytest.raises(RunBusy, match=r"launch 1 \(host elsewhere, pid 1, at step 77"):
        begin(run, watch_s=30, say=said.append)
    assert any("watching for 30 s" in text for text in said)


def test_a_launch_elsewhere_whose_counter_stands_still_is_replaced(run):
    making.launch(run, 1, outcome=None)
    with Beating(run, 1, beats=1) as beating:
        wait_until(lambda: not beating.left)
        os.utime(run.store.path("launches/00001.beat"), (2**31, 2**31))
        start = time.monotonic()
        assert begin(run, watch_s=1).number == 2
        assert 1 <= time.monotonic() - start < 10


def test_a_draining_writer_elsewhere_is_waited_for_not_taken_for_a_launch(run):
    making.launch(run, 1, outcome=None)
    said = []
    with Beating(run, 1, phase="draining", beats=30):
        assert begin(run, watch_s=1, say=said.append).number == 2
    assert any("waiting for the writer of launch 1" in text for text in said)


BEATER = """
import sys
from ckpt import liveness
from ckpt.store import open_store
liveness.beat(open_store(sys.argv[1]), 1, 1, step=5, phase="draining")
print("beating", flush=True)
sys.stdin.read()
"""


def test_an_orphaned_writer_is_waited_for_until_it_is_gone(run):
    making.launch(run, 1, outcome=None, **_dead_here())
    with python(BEATER, run.uri) as writer:
        assert writer.stdout.readline() == "beating\n"
        said, begun = [], []
        thread = threading.Thread(target=lambda: begun.append(begin(run, say=said.append)))
        thread.start()
        wait_until(lambda: any(f"pid {writer.pid}" in text for text in said))
        # Fenced before it is waited for, so that nothing it does now can still commit.
        with pytest.raises(Fenced, match=f"pid {os.getpid()}"):
            assert_not_fenced(run.store, 1)
        assert thread.is_alive() and not begun
        writer.send_signal(signal.SIGTERM)
        writer.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert begun[0].number == 2


def test_waiting_for_an_orphan_has_a_deadline(run):
    making.launch(run, 1, outcome=None, **_dead_here())
    with python(BEATER, run.uri) as writer:
        assert writer.stdout.readline() == "beating\n"
        said = []
        assert begin(run, drain_deadline_s=0.3, say=said.append).number == 2
        assert any("going on" in text for text in said)


def test_beginning_commits_what_dead_launches_left_complete(run):
    making.launch(run, 1, outcome=None, **_dead_here())
    whole = making.write_attempt(run, 10, 1, world_size=2)
    making.write_attempt(run, 15, 1, parts=False)
    said = []
    begin(run, say=said.append)
    from ckpt import latest_valid

    assert latest_valid(run.uri).attempt == whole
    assert any(whole in text for text in said)


def test_a_launch_beats_from_its_beginning(run, monkeypatch):
    seen = []
    monkeypatch.setattr(launches, "posthumous", lambda run, number, say: seen.append(number) or [])
    wait = launches._wait_for_orphans

    def watched(store, number, *rest):
        wait_until(lambda: liveness.read_beat(store, number).get("phase") == "training")
        wait(store, number, *rest)

    monkeypatch.setattr(launches, "_wait_for_orphans", watched)
    begin(run)
    assert seen == [1] and liveness.read_beat(run.store, 1)["pid"] == os.getpid()


def test_fencing_looks_at_numbers_only(run):
    for number in (2, 9, 10, 100000):
        making.launch(run, number)
    run.store.put("launches/00011.end.json", b"{}")
    run.store.put("launches/99999999999.json", b"{}")
    run.store.put("launches/000200000.json", b"{}")
    assert_not_fenced(run.store, 100000)
    with pytest.raises(Fenced, match="overtaken by launch 100000"):
        assert_not_fenced(run.store, 99999)
    assert begin(run).number == 100001


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"pid":"x","host":[1]}', b'{"pid":-1}', b"x" * (5 << 20)],
)
def test_torn_or_hostile_launch_files_count_as_launches_of_nobody(run, data):
    run.store.make_dir("launches")
    for kind in ("json", "parent.json", "end.json", "beat"):
        run.store.path(names.launch_file(3, kind)).write_bytes(data if kind != "end.json" else b"")
    assert [launch.number for launch in list_launches(run.store)] == [3]
    assert begin(run, watch_s=0.2).number == 4


def test_a_config_too_big_to_be_read_back_is_refused_before_anything_is_written(run):
    with pytest.raises(StateError, match="bytes of JSON"):
        begin_launch(run, owner="", config={"text": "x" * (5 << 20)}, say=print)
    assert launches.launch_numbers(run.store) == [] and run.store.list("launches") == []


def test_when_numbers_have_run_out_that_is_said(run):
    making.launch(run, 999_999_999)
    with pytest.raises(StorageError, match="no higher one"):
        begin(run)


def test_a_listing_without_any_launch_is_no_permission_to_write(run):
    with pytest.raises(StorageError, match="is not there"):
        assert_launched(run.store, 1)
    assert_launched(run.store, begin(run).number)


def test_a_parent_from_another_run_never_leads_into_this_runs_own_launches(run, tmp_path):
    other = open_run(tmp_path / "other")
    making.launch(other, 1)
    foreign = making.checkpoint(other, 30)
    making.launch(run, 1)
    own = making.checkpoint(run, 5)
    launch = begin(run)
    record_parent(run, launch, foreign)
    assert list_launches(run.store)[-1].parent == {
        "uri": foreign.uri,
        "attempt": foreign.attempt,
        "step": 30,
    }
    assert [c.step for c in candidates(run)] == [own.step]


def test_parent_and_end_are_recorded_once(run):
    launch = begin(run)
    one, two = making.checkpoint(run, 5), making.checkpoint(run, 10)
    record_parent(run, launch, one)
    record_parent(run, launch, one)
    with pytest.raises(StorageError, match="already records"):
        record_parent(run, launch, two)
    assert record_end(run, launch, "preempted", "SIGTERM", 12)
    assert not record_end(run, launch, "finished", None, 20)
    found = list_launches(run.store)[0]
    assert found.parent == {"attempt": one.attempt, "step": 5, "launch": 1}
    assert (found.end["outcome"], found.end["cause"], found.end["last_step"]) == ("preempted", "SIGTERM", 12)
    with pytest.raises(StorageError, match="finished, preempted, failed"):
        record_end(run, launch, "won")


@pytest.mark.parametrize("lost", ["its file", "all files"])
def test_the_number_of_a_launch_whose_file_is_lost_is_not_used_again(run, lost):
    old = begin(run)
    made = making.checkpoint(run, 5, old.number)
    record_parent(run, old, None)
    record_end(run, old, "finished")
    for path in run.store.path("launches").iterdir():
        if lost == "all files" or path.name == "00001.json":
            path.unlink()
    new = begin(run)
    record_parent(run, new, made)
    later = making.checkpoint(run, 6, new.number)
    assert new.number == 2 and next(candidates(run)) == later


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to itself"])
def test_what_lies_in_the_place_of_the_next_launch_file_does_not_hold_an_opener(run, kind):
    place = run.store.path("launches/00001.json")
    place.parent.mkdir(exist_ok=True)
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere" if kind == "dangling link" else place.name)
    assert begin(run, watch_s=0.1).number == 2
