"""How a manager begins, ends, and survives what happens between a step and the next."""

import math
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import ckpt
from ckpt.deciding import Decider
from ckpt.errors import StateError, StorageError
from ckpt.launches import list_launches
from ckpt.manager import CheckpointManager
from ckpt.policies import All, Any, Continuous, EverySteps, KeepEvery, KeepLast, OverheadBudget
from ckpt.settling import Settler
from ckpt.stats import Tally
from tests.ckpt.managing import Toy, copy_of, manager, run_python, same, steps, stored, wait_until


def end_of(m):
    end = list_launches(m.run.store)[-1].end
    return end["outcome"], end["cause"]


def break_in_the_middle_of_a_step(toy):
    def half(*_):
        raise ZeroDivisionError("in the middle")

    handle = toy.optim.register_step_post_hook(half)
    try:
        toy.train()
    finally:
        handle.remove()


@pytest.mark.parametrize("final", [{}, {"final_step": 4}])
def test_an_error_in_the_middle_of_an_update_never_commits_it(tmp_path, final):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(2))
    with pytest.raises(ZeroDivisionError):
        try:
            for step in (1, 2, 3):
                toy.train()
                if step == 2:
                    expected = copy_of(toy.state)
                m.step(step)
                m.drain(30)
            break_in_the_middle_of_a_step(toy)
        finally:
            m.close(**final)
    assert steps(tmp_path) == [2] and same(stored(tmp_path), expected)
    assert end_of(m) == ("failed", "ZeroDivisionError: in the middle")
    assert any("after step 3 an optimizer has moved" in line for line in m.said)


def test_an_error_between_two_updates_commits_the_last_step_and_is_recorded(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(50))
    toy.train()
    m.step(1)
    with pytest.raises(ValueError, match="data"):
        try:
            raise ValueError("bad data")
        finally:
            m.close()
    assert steps(tmp_path) == [1]
    assert end_of(m) == ("failed", "ValueError: bad data")


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyboardInterrupt(), "preempted"), (SystemExit(143), "preempted")]
)
def test_an_interrupted_launch_is_recorded_as_preempted(tmp_path, error, outcome):
    toy = Toy()
    m = manager(tmp_path, toy.state)
    toy.train()
    m.step(1)
    with pytest.raises(type(error)):
        try:
            toy.optim.step()
            raise error
        finally:
            m.close()
    assert steps(tmp_path) == [] and end_of(m)[0] == outcome


def test_what_is_named_as_the_last_step_is_saved_though_step_was_never_called_for_it(tmp_path):
    for number, final in enumerate((8, 7)):
        home = tmp_path / str(number)
        toy = Toy()
        m = manager(home, toy.state)
        toy.train()
        m.step(7)
        toy.train()
        expected = copy_of(toy.state)
        m.close(final_step=final)
        assert steps(home) == [final] and same(stored(home), expected)
        assert end_of(m) == ("finished", None) and m.said == []


def test_an_update_that_no_step_was_called_for_is_not_saved_as_the_step_before(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state)
    toy.train()
    m.step(1)
    toy.train()
    m.close()
    assert steps(tmp_path) == [] and end_of(m)[0] == "preempted"


def test_an_error_that_was_handled_before_is_no_failure_of_the_launch(tmp_path):
    toy = Toy()
    try:
        raise MemoryError
    except MemoryError:
        m = manager(tmp_path, toy.state)
        toy.train()
        m.step(1)
        m.close()
    assert steps(tmp_path) == [1] and end_of(m) == ("finished", None)


def test_a_with_statement_commits_the_last_step_and_after_an_error_none(tmp_path):
    toy = Toy()
    with manager(tmp_path / "well", toy.state) as m:
        toy.train()
        m.step(1)
    assert steps(tmp_path / "well") == [1] and end_of(m) == ("finished", None)
    with pytest.raises(ValueError, match="no"), manager(tmp_path / "badly", toy.state) as m:
        toy.train()
        m.step(2)
        raise ValueError("no")
    assert steps(tmp_path / "badly") == [] and end_of(m) == ("failed", "ValueError: no")
    with pytest.raises(SystemExit), manager(tmp_path / "exit", toy.state) as m:
        toy.train()
        m.step(3)
        sys.exit(0)
    assert steps(tmp_path / "exit") == [3] and end_of(m) == ("finished", None)


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_run_folder_that_is_gone_fails_saves_and_is_not_made_anew(tmp_path, gone):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    m.step(1)
    m.drain(30)
    gone(tmp_path / "run")
    for step in (2, 3, 4):
        toy.train()
        with pytest.raises(StorageError, match=r"run folder .* is gone"):
            m.save(step, wait=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(StorageError):
        m.close()
    assert not (tmp_path / "run").exists()


def test_closing_keeps_its_deadline_though_every_slot_is_taken(tmp_path, faults_on):
    faults_on({"match": "writer:pwrite:", "nth": 1, "do": "delay", "seconds": 8})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    m.step(1)
    toy.train()
    m.step(2)
    start = time.monotonic()
    with pytest.raises(StorageError, match="the last step, 2, could not be committed"):
        m.close(timeout=1.0)
    assert time.monotonic() - start < 6


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("hangs")])
def test_a_save_that_was_decided_on_but_never_began_does_not_end_saving(tmp_path, monkeypatch, error):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    real = Settler.wait_any

    def fail(*_):
        monkeypatch.setattr(Settler, "wait_any", real)
        raise error

    monkeypatch.setattr(Settler, "wait_any", fail)
    toy.train()
    with pytest.raises(type(error)):
        m.step(1)
    toy.train()
    assert m.step(2)
    m.close()
    assert steps(tmp_path) == [2]


def test_a_state_that_changes_during_every_copy_ends_in_an_error_that_says_what_to_do(tmp_path, faults_on):
    faults_on({"match": "trainer:stage:begin", "do": "delay", "seconds": 0.2})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    with pytest.raises(StateError, match=r"3 saves in a row.*call step\(\) after the last change"):
        for step in range(1, 20):
            toy.train()
            m.step(step)
            for p in toy.model.parameters():
                p.data.mul_(1.001)
            wait_until(lambda: m.stats.backlog == 0)
    with pytest.raises(StateError, match="wait_staged"):
        m.drain()
    m.close(save=False)


def test_a_slow_callback_holds_up_nobody_and_gets_all_events_in_order(tmp_path):
    seen, threads = [], set()

    def slowly(event):
        time.sleep(0.2)
        threads.add(threading.current_thread())
        seen.append((event["step"], event["state"]))

    toy = Toy()
    m = CheckpointManager(str(tmp_path / "run"), toy.state, save=EverySteps(1), on_event=slowly)
    slowest = 0.0
    for step in (1, 2, 3, 4):
        toy.train()
        start = time.monotonic()
        m.step(step)
        slowest = max(slowest, time.monotonic() - start)
        m.drain(30)
    m.close()
    assert slowest < 0.2 and threading.main_thread() not in threads
    assert seen == [(n, state) for n in (1, 2, 3, 4) for state in ("begun", "durable", "committed")]


def test_of_a_callback_that_hangs_only_so_many_events_wait():
    from ckpt.telling import Teller

    go, seen, said = threading.Event(), [], []

    def hang(event):
        go.wait(30)
        seen.append(event["step"])

    teller = Teller(hang, said.append)
    for step in range(3000):
        teller.tell({"state": "skipped", "step": step})
    go.set()
    teller.close(30)
    assert seen == list(range(len(seen))) and 1000 <= len(seen) <= 1001
    assert said == [f"on_event is too slow: {3000 - len(seen)} events were left out"]


FORKED = """
import json, os, signal, sys
from pathlib import Path
import torch
from ckpt.policies import EverySteps
from tests.ckpt.managing import Toy, manager, steps

torch.set_num_threads(1)
home, toy = Path(sys.argv[1]), Toy()
m = manager(home, toy.state, save=EverySteps(1))
toy.train()
m.step(1)
child = os.fork()
if child == 0:
    signal.alarm(20)
    m.wait_staged()
    m.drain()
    os._exit(0)
ended = os.waitpid(child, 0)[1]
m.close()
print(json.dumps([ended, steps(home)]))
"""


def test_a_child_forked_during_a_copy_does_not_wait_for_it(tmp_path):
    slow = [{"match": "trainer:stage:begin", "do": "delay", "seconds": 0.5}]
    assert run_python(FORKED, tmp_path, faults=slow) == [0, [1]]


class Saves:
    def should_save(self, now):
        return False


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"save": KeepLast(3)}, "save must be a policy"),
        ({"save": Any(Saves(), All(KeepLast(3)))}, "save must be a policy"),
        ({"save": Saves}, "save must be a policy"),
        ({"keep": EverySteps(3)}, "keep must be a policy"),
        ({"keep": Any(KeepLast(3), EverySteps(3))}, "keep must be a policy"),
        ({"state": [torch.zeros(1)]}, "state must be a mapping"),
        ({"run": 5}, "run must be"),
        ({"run": ""}, "run must be"),
        ({"threads": 2.5}, "threads must be"),
        ({"bandwidth_limit": "fast"}, "bandwidth_limit must be"),
        ({"posthumous_s": math.nan}, "posthumous_s must be"),
        ({"rank_timeout_s": math.inf}, "rank_timeout_s must be"),
        ({"rank_timeout_s": math.nan}, "rank_timeout_s must be"),
        ({"rank_timeout_s": "600"}, "rank_timeout_s must be"),
        ({"rank_timeout_s": 0}, "rank_timeout_s must be"),
        ({"say": "loud"}, "say must be"),
        ({"on_event": 1}, "on_event must be"),
        ({"config": [1]}, "config must be"),
        ({"overrides": "a=1"}, "overrides must be"),
    ],
)
def test_what_a_manager_can_not_work_with_is_refused_before_any_folder_is_made(tmp_path, wrong, named):
    with pytest.raises(StateError, match=named):
        CheckpointManager(**{"run": str(tmp_path / "run"), "state": {}} | wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(2.5),
        lambda: EverySteps(True),
        lambda: KeepEvery(0.5),
        lambda: OverheadBudget(1000),
        lambda: Continuous(True),
        lambda: Continuous("x"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_when_it_is_made(make):
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"l": torch.zeros(2)}, "the metric 'l'"),
        ({"l": object()}, "the metric 'l'"),
        ([1], "metrics must map"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused_by_name_and_saving_goes_on(tmp_path, metrics, named):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    with pytest.raises(StateError, match=named):
        m.step(1, metrics)
    toy.train()
    m.step(2, {"l": torch.tensor(1.5), "n": 3})
    m.close()
    assert steps(tmp_path) == [2] and ckpt.checkpoints(str(tmp_path / "run"))[0].metrics == {"l": 1.5, "n": 3}


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_an_endless_timeout_is_one_and_nonsense_is_refused(tmp_path, timeout):
    m = manager(tmp_path, {"x": 1})
    m.step(1)
    for wrong in (math.nan, "3"):
        with pytest.raises(StateError, match="timeout must be"):
            m.close(timeout=wrong)
    m.drain(timeout=timeout)
    m.close(timeout=timeout)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_broken_promise_is_forgotten_and_a_kept_one_is_not_made_twice(ranks):
    settler = SimpleNamespace(
        fenced=None, bad_in_a_row=0, retry=False, take_replan=lambda: False, in_flight=list
    )
    settler.free_slot = lambda slots: 0
    team = SimpleNamespace(world_size=ranks, stop_asked=lambda: False)
    decider = Decider(
        EverySteps(1), team, settler, Tally(), slots=1, when_busy="skip", max_failed=3, skipped=print
    )
    # Several ranks decide on the next call before they carry out this one's decision.
    decided = [decider.decide(step, step - 1).token is not None for step in range(1, 7)]
    assert decided == ([True] * 6 if ranks == 1 else [True, False] * 3)
