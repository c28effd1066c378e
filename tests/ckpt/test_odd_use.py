"""A manager that is used oddly refuses at once, and what it commits stays true."""

import os

import pytest
import torch

import ckpt
from ckpt.errors import StateError
from ckpt.policies import EverySteps, KeepBest, KeepLast
from tests.ckpt.managing import Toy, copy_of, manager, run_python, same, steps, stored


@pytest.mark.parametrize("kept", [1, -1])
def test_of_two_saves_of_one_step_the_later_is_the_newest(tmp_path, kept):
    toy = Toy()
    m = manager(tmp_path, toy.state, keep=KeepLast(kept))
    for _ in range(6):
        toy.train()
        m.save(5, wait=True)
        assert same(copy_of(toy.state), stored(tmp_path))
    m.close()
    newest = ckpt.latest_valid(str(tmp_path / "run"))
    assert same(copy_of(toy.state), ckpt.load_tensors(newest, prefix=""))
    assert len(steps(tmp_path)) == (1 if kept == 1 else 6)


@pytest.mark.parametrize("step", [-1, 10**15, 2.0, True, "3", None])
def test_a_step_that_no_checkpoint_can_be_named_after_is_refused_and_saving_goes_on(tmp_path, step):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    for call in (m.step, m.save):
        with pytest.raises(StateError, match="a step is a whole number from 0 to"):
            call(step)
    m.step(torch.tensor(4))
    m.close()
    assert steps(tmp_path) == [4] and m.said == []


def test_a_closed_manager_refuses_to_go_on_at_once(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    m.step(1)
    m.close()
    m.close()
    for call in (lambda: m.step(2), lambda: m.save(2), lambda: m.save(2, wait=True), m.restore):
        with pytest.raises(StateError, match="closed"):
            call()
    assert steps(tmp_path) == [1]


def test_a_launch_that_has_restored_or_saved_refuses_to_restore_and_keeps_its_state(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1), keep=KeepLast(-1))
    for step in (1, 2, 3):
        toy.train()
        m.step(step)
        m.drain()
    now = copy_of(toy.state)
    with pytest.raises(StateError, match="restored or saved already"):
        m.restore("step:1")
    m.close()
    m = manager(tmp_path, toy.state)
    m.restore()
    with pytest.raises(StateError, match="restored or saved already"):
        m.restore("step:1")
    m.close(save=False)
    assert same(copy_of(toy.state), now)


class Broken:
    def keep(self, history):
        raise ZeroDivisionError("of this policy")


@pytest.mark.parametrize("keep", [KeepBest("loss", "min"), Broken()])
def test_what_a_keep_policy_can_not_handle_never_makes_a_committed_save_fail(tmp_path, keep):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1), keep=keep)
    for step, loss in enumerate((10**400, float("nan"), 1.0, -(10**400)), start=1):
        toy.train()
        m.step(step, metrics={"loss": loss})
        m.drain()
    m.close()
    assert m.stats.failed == 0 and steps(tmp_path)[0] == 4 and 3 in steps(tmp_path)
    if isinstance(keep, KeepBest):
        run = ckpt.open_run(str(tmp_path / "run"))
        assert ckpt.discover.find(run, "best:loss:max").step == 3
    else:
        assert "of this policy" in m.said[0] and len(os.listdir(tmp_path / "run")) > 4


@pytest.mark.parametrize("which", ["step:" + "9" * 5000, "step:-1", "", "tag:../x", "best::"])
def test_nonsense_that_is_asked_for_is_refused_as_such(tmp_path, which):
    m = manager(tmp_path, Toy().state)
    with pytest.raises(StateError):
        m.restore(which)
    m.close(save=False)


FORKED = """
import json, os, signal, sys
from pathlib import Path
import torch
from ckpt.errors import StateError
from ckpt.launches import list_launches
from ckpt.policies import EverySteps, KeepLast
from tests.ckpt.managing import Toy, copy_of, manager, same, steps, stored

torch.set_num_threads(1)
home, toy = Path(sys.argv[1]), Toy()
m = manager(home, toy.state, save=EverySteps(1), keep=KeepLast(-1), when_busy="wait")
ended, right = [], []
for step in range(1, 5):
    toy.train()
    m.step(step)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            toy.optim.step()
            m.close()
            m.step(step + 100)
        except StateError:
            os._exit(0)
        finally:
            os._exit(1)
    ended.append(os.waitpid(child, 0)[1])
    m.drain()
    right.append(same(copy_of(toy.state), stored(home)) and list_launches(m.run.store)[0].end is None)
m.close()
print(json.dumps([ended, right, steps(home), m.said]))
"""


def test_a_forked_child_can_neither_disturb_its_parents_run_nor_hang_in_an_optimizer(tmp_path):
    slow = [{"match": "trainer:stage:begin", "do": "delay", "seconds": 0.3}]
    ended, right, done, said = run_python(FORKED, tmp_path, faults=slow)
    assert ended == [0] * 4 and right == [True] * 4 and done == [4, 3, 2, 1] and said == []
