"""Real launches under torchrun: how they begin, stop, fail, and that nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import ckpt
from ckpt.launches import list_launches
from ckpt.run import open_run
from tests.training.harness import config, ids, start, train_here
from tests.training.waiting import until
from training import procs
from training.launch import TrainerProcess

SLOW = 0.05  # seconds a step takes where a test has to act in the middle of a run


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Starts trainers; whatever a test left running is killed and fails it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    started = []

    def launch(run, changes=None, **more):
        started.append(start(run, changes, **more))
        return started[-1]

    yield launch
    tempfile.tempdir = None
    for trainer in started:
        trainer.kill()
        trainer.wait(20)
        assert trainer.pids() == []
    assert not list(tmp_path.glob("trainer-*")), "a private folder was left behind"


def slow(steps=40, **more):
    """Changes that make every step take a moment."""
    sleeping = {str(number): SLOW for number in range(1, 4000)}
    return {"trainer.max_steps": steps, "model.at": sleeping, **more}


def follow_to(trainer, step, timeout=60):
    for event in trainer.events(timeout):
        if event["event"] == "step" and event["step"] >= step:
            return event
    pytest.fail(f"never reached step {step}: {trainer.wait(5)}")


def last_end(run):
    return list_launches(open_run(str(run), create=False).store)[-1].end


def gold_after(folder, changes):
    """The weights of the same run, never stopped."""
    return train_here(folder / "gold", config(changes)).end["weights_digest"]


def finish(run, changes):
    """Resume in this process and return the final weights."""
    return train_here(run, config(changes)).end["weights_digest"]


def test_a_launch_trains_to_the_end_commits_the_last_step_and_leaves_nothing(tmp_path, launched):
    run = tmp_path / "run"
    trainer = launched(run, {"trainer.max_steps": 12, "trainer.workers": 1})
    events = list(trainer.events(60))
    outcome = trainer.wait(20)
    assert (outcome.state, outcome.last_step, outcome.returncode) == ("finished", 12, 0)
    names = [event["event"] for event in events]
    assert names[0] == "start"
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 13))
    assert events[-1]["weights_digest"] == gold_after(tmp_path, {"trainer.max_steps": 12})
    times = [event["t"] for event in events if event["event"] == "step"]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()
    assert ckpt.latest_valid(str(run)).step == 12
    assert last_end(run)["outcome"] == "finished"
    assert (run / "logs/00001/rank-00000.log").exists()
    assert [path.name for path in (run / "logs").iterdir()] == ["00001"]
    assert trainer.pids() == []


@pytest.mark.parametrize("how", ["control", "agent", pytest.param("rank", marks=pytest.mark.long)])
def test_o1_a_stop_by_control_by_torchrun_or_by_the_scheduler_saves_and_resumes_exactly(
    tmp_path, launched, how
):
    run = tmp_path / "run"
    trainer = launched(run, slow(400, **{"trainer.workers": 2}))
    follow_to(trainer, 7)
    rank = next(iter(trainer._sessions))
    if how == "control":
        trainer.request_stop("asked by a test")
    else:
        os.kill(trainer._agent.pid if how == "agent" else rank, signal.SIGTERM)
    outcome = trainer.wait(30)
    assert outcome.state == "preempted"
    assert outcome.last_step >= 7
    assert ckpt.latest_valid(str(run)).step == outcome.last_step == last_end(run)["last_step"]
    assert last_end(run)["cause"] == ("asked by a test" if how == "control" else "signal SIGTERM")
    last = outcome.last_step + 5
    assert finish(run, {"trainer.max_steps": last}) == gold_after(tmp_path, {"trainer.max_steps": last})


def test_o1_a_stop_during_start_up_is_honoured_and_makes_no_checkpoint(tmp_path, launched):
    trainer = launched(tmp_path / "run", slow())
    until(lambda: trainer._sessions, 30, "a rank")
    trainer.request_stop("changed my mind")
    outcome = trainer.wait(30)
    assert outcome.state == "preempted"
    assert not outcome.last_step
    assert ckpt.checkpoints(str(tmp_path / "run")) == []


def test_o1_a_stop_before_any_rank_began_ends_at_once(tmp_path, launched):
    trainer = launched(tmp_path / "run", slow())
    trainer.request_stop("changed my mind")
    assert trainer.wait(10).state == "preempted"


def test_o1_a_stop_while_the_run_is_opened_is_honoured(tmp_path, launched, monkeypatch):
    rule = {"match": r"trainer:create:.*launches/00001\.json", "nth": 1, "do": "delay", "seconds": 60}
    trainer = launched(tmp_path / "run", slow(), env={"CKPT_FAULTS": json.dumps([rule])})
    until(lambda: trainer._sessions, 30, "a rank")
    time.sleep(1.0)  # long enough to be in the delay; a stop before it must work just as well
    trainer.request_stop("changed my mind")
    before = time.monotonic()
    assert trainer.wait(30).state == "preempted"
    assert time.monotonic() - before < 15


def test_m1_a_trainer_saves_and_stops_when_its_flow_is_killed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    open_run(str(run))
    given = {"config": config(slow(400, **{"trainer.workers": 2})), "overrides": [], "run_uri": str(run)}
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({**given, "log_dir": str(run / "logs")}))
    flow = subprocess.Popen(
        [sys.executable, "-m", "tests.training.flow", str(spec)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pids = []
    try:
        for line in flow.stdout:
            event = json.loads(line)
            if event.get("step", 0) >= 7:
                pids = event["pids"]
                break
    finally:
        flow.kill()
        flow.wait()
        flow.stdout.close()
    assert len(pids) == 4  # the agent, its rank, two loader workers
    until(lambda: not any(alive(pid) for pid in pids), 30, "the end of every process")
    assert not list(tmp_path.glob("trainer-*")), "the private folder was left behind"
    assert last_end(run)["outcome"] == "preempted"
    assert ckpt.latest_valid(str(run)).step == last_end(run)["last_step"] >= 7
    last = last_end(run)["last_step"] + 5
    assert finish(run, {"trainer.max_steps": last}) == gold_after(tmp_path, {"trainer.max_steps": last})


def alive(pid):
    found = procs.read(pid)
    return found is not None and found.state not in "ZX"


def test_ranks_save_and_stop_when_torchrun_is_killed_and_the_launch_counts_as_failed(tmp_path, launched):
    run = tmp_path / "run"
    trainer = launched(run, slow(400))
    follow_to(trainer, 7)
    os.kill(trainer._agent.pid, signal.SIGKILL)
    outcome = trainer.wait(30)
    assert (outcome.state, outcome.cause) == ("failed", "torchrun ended (killed by SIGKILL)")
    assert ckpt.latest_valid(str(run)).step == outcome.last_step >= 7
    assert last_end(run)["outcome"] == "failed"


def test_a_failed_rank_is_told_with_its_cause_its_last_step_and_its_last_lines(tmp_path, launched):
    run = tmp_path / "run"
    trainer = launched(run, {"model.at": {"8": "raise"}})
    outcome = trainer.wait(60)
    assert (outcome.state, outcome.last_step) == ("failed", 7)
    assert outcome.returncode != 0
    assert outcome.cause == "ArithmeticError: the toy broke as it was told to"
    assert outcome.tail[0][-1] == "ArithmeticError: the toy broke as it was told to"
    assert last_end(run)["outcome"] == "failed"
    assert "the toy broke" in last_end(run)["cause"]


def test_a_rank_that_was_killed_is_told_with_its_signal(tmp_path, launched):
    trainer = launched(tmp_path / "run", {"model.at": {"8": "SIGKILL"}})
    outcome = trainer.wait(60)
    assert (outcome.state, outcome.cause) == ("failed", "rank 0: killed by SIGKILL")


def test_a_second_trainer_on_a_live_run_is_refused_by_name(tmp_path, launched):
    run = tmp_path / "run"
    first = launched(run, slow(steps=4000))
    follow_to(first, 2)
    outcome = launched(run, slow()).wait(60)
    assert outcome.state == "refused"
    assert "RunBusy" in outcome.cause
    assert str(next(iter(first._sessions))) in outcome.cause
    assert [path.name for path in (run / "logs").iterdir()] == ["00001"]
    assert first.pids()


@pytest.mark.long
def test_a_trainer_whose_run_was_taken_over_stops_as_fenced(tmp_path, launched):
    run = tmp_path / "run"
    first = launched(run, slow(steps=4000))
    follow_to(first, 2)
    second = launched(run, slow(steps=4000), takeover=True)
    follow_to(second, 2)
    assert first.wait(60).state == "fenced"
    second.request_stop("enough")
    assert second.wait(60).state == "preempted"


def test_a_trainer_that_does_not_stop_in_time_is_killed_with_all_its_children(tmp_path, launched):
    changes = {"model.at": {"5": f"hang:{tmp_path / 'hangs'}"}, "trainer.workers": 2}
    trainer = launched(tmp_path / "run", changes, grace_s=1.5)
    until((tmp_path / "hangs").exists, 60, "the fifth step")
    assert len(trainer.pids()) == 4
    trainer.request_stop("hurry")
    outcome = trainer.wait(20)
    assert (outcome.state, outcome.cause) == ("failed", "did not stop within 1.5 s and was killed")
    assert trainer.pids() == []


@pytest.mark.long
def test_torch_elastic_restarts_a_rank_that_died_and_the_result_is_the_same(tmp_path, launched):
    run = tmp_path / "run"
    died_once = tmp_path / "died"
    changes = {
        "launcher.max_restarts": 1,
        "model.die_once": str(died_once),
        "model.trace": str(tmp_path / "ids"),
    }
    trainer = launched(run, changes)
    outcome = trainer.wait(90)
    assert outcome.state == "finished"
    assert died_once.exists()
    assert len(list_launches(open_run(str(run)).store)) == 2
    digest = gold_after(tmp_path, {})
    assert [e for e in trainer.events(1) if e["event"] == "end"][-1]["weights_digest"] == digest
    assert sorted(set(ids(tmp_path / "ids"))) == list(range(64))


def test_the_parent_imports_no_torch():
    code = "import sys, training.launch; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_trainer_processes_start_in_a_moment(tmp_path, launched):
    before = time.perf_counter()
    trainer = launched(tmp_path / "run")
    assert time.perf_counter() - before < 1.0
    assert isinstance(trainer, TrainerProcess)
