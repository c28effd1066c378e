import math
import os
import signal
import time

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import StateError, StorageError
from ckpt.launches import list_launches
from ckpt.policies import EverySteps, KeepBest, KeepLast
from tests.ckpt.managing import Toy, copy_of, manager, run_python, same, steps, stored, wait_until


class Never:
    def should_save(self, now):
        return False


def test_what_is_saved_is_the_state_at_the_call_though_training_goes_on(tmp_path):
    toy = Toy()
    with_manager = manager(tmp_path, toy.state, save=EverySteps(3))
    for step in range(1, 4):
        toy.train()
        began = with_manager.step(step)
    assert began
    expected = copy_of(toy.state)
    toy.train()
    with torch.no_grad():
        for p in toy.model.parameters():
            p.add_(1)
    with_manager.drain(30)
    assert same(stored(tmp_path), expected)
    with_manager.close(save=False)


def test_state_may_be_changed_by_hand_right_after_a_save_by_hand(tmp_path):
    toy = Toy(width=2048)
    m = manager(tmp_path, toy.state, save=Never())
    toy.train()
    m.save(1)
    expected = copy_of(toy.state)
    with torch.no_grad():
        for p in toy.model.parameters():
            p.add_(1)
    m.drain(30)
    m.close(save=False)
    changed = copy_of(toy.state)
    assert not same(expected, changed)
    assert same(stored(tmp_path), expected)


def test_the_state_at_the_call_is_saved_however_slow_the_storage_is(tmp_path, faults_on):
    faults_on({"match": "writer:pwrite:", "do": "delay", "seconds": 0.5})
    toy = Toy()
    m = manager(tmp_path, toy.state)
    toy.train()
    expected = copy_of(toy.state)
    m.save(5)
    with torch.no_grad():
        for p in toy.model.parameters():
            p.add_(1)
    m.drain(30)
    m.close(save=False)
    assert same(stored(tmp_path), expected)


def test_a_finished_run_has_its_last_step_committed_exactly_once(tmp_path):
    for steps_done, expected in ((32, [32, 30, 25]), (30, [30, 25, 20])):
        folder = tmp_path / str(steps_done)
        toy = Toy()
        m = manager(folder, toy.state, save=EverySteps(5))
        for step in range(1, steps_done + 1):
            toy.train()
            m.step(step, {"loss": step / 2})
            m.drain(30)
        m.close()
        m.finish("finished")
        assert steps(folder) == expected
        assert ckpt.checkpoints(str(folder / "run"))[0].metrics == {"loss": steps_done / 2}


def test_closing_raises_if_the_last_step_could_not_be_committed(tmp_path, faults_on):
    faults_on({"match": "writer:.*step-000000007", "do": "raise", "errno": 28})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(5))
    for step in range(1, 8):
        toy.train()
        m.step(step)
        m.drain(30)
    with pytest.raises(StorageError, match=r"last step, 7.*No space left"):
        m.close()
    assert steps(tmp_path) == [5]
    assert list_launches(m.run.store)[0].end["outcome"] == "failed"


def test_a_failed_save_is_told_before_the_next_and_training_goes_on(tmp_path, faults_on):
    faults_on({"match": "writer:.*step-000000010", "do": "raise", "errno": 5})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(5), keep=KeepLast(-1))
    for step in range(1, 18):
        toy.train()
        m.step(step)
        if step in (5, 10, 15):
            wait_until(lambda: m.stats.backlog == 0)
        if step == 11:
            assert any("step 10" in line and "Input/output error" in line for line in m.said)
            assert [e["step"] for e in m.events if e["state"] == "failed"] == [10]
    m.close()
    assert steps(tmp_path) == [17, 15, 5]
    assert m.stats.failed == 1


def test_saves_that_fail_again_and_again_stop_the_run_and_leave_earlier_checkpoints(tmp_path, faults_on):
    faults_on({"match": "writer:.*step-00000000[4-9]", "do": "raise", "errno": 28})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(2), max_failed_saves=2)
    for step in range(1, 7):
        toy.train()
        m.step(step)
        wait_until(lambda: m.stats.backlog == 0)
    with pytest.raises(StorageError, match=r"2 saves in a row.*No space left"):
        m.step(7)
    m.close(save=False)
    assert steps(tmp_path) == [2]
    assert ckpt.latest_valid(str(tmp_path / "run")).step == 2


def test_the_guard_voids_a_save_whose_state_was_written_to_and_the_next_step_saves_again(tmp_path, faults_on):
    faults_on({"match": "trainer:stage:begin", "nth": 1, "do": "delay", "seconds": 0.3})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(5))
    for step in range(1, 7):
        toy.train()
        expected = copy_of(toy.state)
        m.step(step)
        if step == 5:
            for p in toy.model.parameters():
                p.data.mul_(1.001)
        wait_until(lambda: m.stats.backlog == 0)
    m.close(save=False)
    assert m.stats.voided == 1
    assert steps(tmp_path) == [6]
    assert same(stored(tmp_path), expected)
    assert any("while it was copied" in line for line in m.said)


def test_an_optimizer_waits_for_the_copy_before_it_moves(tmp_path, faults_on):
    faults_on({"match": "trainer:stage:begin", "nth": 1, "do": "delay", "seconds": 0.4})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(2))
    other = torch.nn.Parameter(torch.zeros(1))
    toy.train()
    m.step(1)
    toy.train()
    expected = copy_of(toy.state)
    m.step(2)
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=1.0).step()
    assert 0.2 < m.stats.join_s < 5
    toy.train()
    m.drain(30)
    m.close(save=False)
    assert same(stored(tmp_path), expected)
    assert m.stats.stall_s < 0.3


def test_a_save_that_is_due_while_one_is_in_flight_is_skipped_or_waited_for(tmp_path, faults_on):
    faults_on({"match": "writer:pwrite:", "nth": 1, "do": "delay", "seconds": 1.0})
    for choice in ("skip", "wait"):
        toy = Toy()
        m = manager(tmp_path / choice, toy.state, save=EverySteps(1), when_busy=choice)
        for step in range(1, 5):
            toy.train()
            m.step(step)
        m.drain(30)
        m.close(save=False)
        assert m.stats.skipped + m.stats.committed == 4
        assert (m.stats.skipped > 0) == (choice == "skip")
        assert (m.stats.stall_s > 0.5) == (choice == "wait")  # training waited, so that is what it cost


def test_a_manifest_and_every_event_say_what_the_save_cost(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(2))
    for step in range(1, 4):
        toy.train()
        m.step(step)
    m.drain(30)
    m.close(save=False)
    costs = ckpt.checkpoints(str(tmp_path / "run"))[0].manifest.costs
    assert costs.keys() == {"stall_s", "join_s", "stage_s", "persist_s", "bytes"}
    assert min(costs["stall_s"], costs["stage_s"], costs["persist_s"]) > 0
    told = next(event for event in m.events if event["state"] == "committed")
    assert told["bytes"] == costs["bytes"]
    assert 0 < told["stall_s"] < m.stats.stall_s, "planning was before the first save"
    assert told["durable_s"] == m.stats.last.durable_s > told["persist_s"]
    assert 0 < m.stats.overhead_percent < 100


def test_two_slots_carry_two_saves_at_once(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1), slots=2, when_busy="wait", keep=KeepLast(None))
    expected = {}
    for step in range(1, 7):
        toy.train()
        expected[step] = copy_of(toy.state)
        m.step(step)
    m.close()
    assert steps(tmp_path) == [6, 5, 4, 3, 2, 1]
    assert all(same(stored(tmp_path, step), state) for step, state in expected.items())


def test_a_dead_writer_is_replaced_and_the_save_it_had_is_reported(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(2), keep=KeepLast(-1))
    for step in range(1, 3):
        toy.train()
        m.step(step)
    m.drain(30)
    old = m._settler.writer.pid
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: m._settler.writer.pid != old and m._settler.writer.alive)
    for step in range(3, 7):
        toy.train()
        m.step(step)
        wait_until(lambda: m.stats.backlog == 0)
    m.close()
    assert steps(tmp_path) == [6, 4, 2]
    assert any("writer process" in line for line in m.said)


def test_memory_stays_flat_over_saves_that_succeed_and_that_fail(tmp_path):
    code = """
import json, os, sys, torch, psutil
from pathlib import Path
from tests.ckpt.managing import *
big = torch.nn.Linear(5000, 5000, bias=False)
m = manager(Path(sys.argv[1]), {"big": big}, keep=ckpt.KeepLast(1), max_failed_saves=99)
used = []
for step in range(1, 13):
    try: m.save(step, wait=True)
    except ckpt.StorageError: pass
    used.append(psutil.Process().memory_full_info().pss)
m.close(save=False)
print(json.dumps([used, big.weight.nbytes, m.stats.failed]))
"""
    rules = [{"match": "writer:.*step-00000000[678]", "do": "raise", "errno": 28}]
    used, one, failed = run_python(code, tmp_path, faults=rules)
    assert failed == 3
    assert used[-1] - used[2] < 0.2 * one


def test_a_run_without_any_optimizer_is_saved(tmp_path):
    net = nn.Linear(3, 3)
    m = manager(tmp_path, {"net": net, "n": 5}, save=EverySteps(1), when_busy="wait")
    for step in (1, 2):
        with torch.no_grad():
            m.wait_staged()
            net.weight.add_(1)
        expected = copy_of({"net": net})
        m.step(step)
    m.close()
    assert same(stored(tmp_path), expected)


def test_two_optimizers_of_which_one_steps_late_are_saved_whole(tmp_path):
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    one, two = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    state = {"a": a, "b": b, "one": one, "two": two}
    m = manager(tmp_path, state, save=EverySteps(1), when_busy="wait", keep=KeepLast(-1))
    expected = {}
    for step in range(1, 6):
        for net, optim in ((a, one), (b, two)):
            if net is a or step > 2:
                optim.zero_grad()
                net(torch.ones(1, 2)).sum().backward()
                optim.step()
        expected[step] = copy_of(state)
        m.step(step)
    m.close()
    assert steps(tmp_path) == [5, 4, 3, 2, 1]
    assert all(same(stored(tmp_path, step), tensors) for step, tensors in expected.items())
    assert not any(key.startswith("two.") for key in stored(tmp_path, 2))
    assert any(key.startswith("two.") for key in stored(tmp_path, 3))


def test_an_optimizer_whose_state_grows_is_saved_whole_at_every_step(tmp_path):
    net = nn.Linear(4, 1)
    optim = torch.optim.LBFGS(net.parameters(), history_size=3, max_iter=2)
    state = {"net": net, "optim": optim}
    m = manager(tmp_path, state, save=EverySteps(1), when_busy="wait", keep=KeepLast(-1))
    x = torch.randn(8, 4)

    def closure():
        optim.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        return loss

    expected = {}
    for step in range(1, 6):
        optim.step(closure)
        expected[step] = copy_of(state)
        m.step(step)
    m.close()
    assert all(same(stored(tmp_path, step), tensors) for step, tensors in expected.items())


def test_a_step_that_the_gradient_scaler_skips_does_not_disturb_saving(tmp_path):
    toy = Toy()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = {**toy.state, "scaler": scaler}
    m = manager(tmp_path, state, save=EverySteps(1), when_busy="wait", keep=KeepLast(-1))
    expected = {}
    for step in range(1, 6):
        toy.optim.zero_grad()
        scaler.scale(toy.model(torch.randn(16, 8)).square().mean()).backward()
        if step in (2, 3):
            toy.model[0].weight.grad.fill_(math.inf)
        scaler.step(toy.optim)
        scaler.update()
        expected[step] = copy_of(toy.state)
        m.step(step)
    m.close()
    assert steps(tmp_path) == [5, 4, 3, 2, 1]
    assert all(same(stored(tmp_path, step), tensors) for step, tensors in expected.items())


def test_what_cannot_be_stored_is_refused_by_its_full_name_before_training_goes_on(tmp_path):
    toy = Toy()
    state = {**toy.state, "extra": {"deep": [1, object()]}}
    m = manager(tmp_path, state, save=EverySteps(1))
    toy.train()
    with pytest.raises(StateError, match=r"extra.*deep.*\[?1"):
        m.step(1)
    m.close(save=False)
    assert steps(tmp_path) == []


def test_a_view_stores_only_what_it_shows(tmp_path):
    big = torch.arange(10_000_000, dtype=torch.float32)
    m = manager(tmp_path, {"view": {"list": [big[:10]], "t": big[10:20]}})
    m.save(1, wait=True)
    assert m.stats.bytes < 1 << 20
    m.close(save=False)
    assert torch.equal(stored(tmp_path)["view.t"], big[10:20])


def test_only_policies_and_pins_decide_what_is_kept(tmp_path):
    toy = Toy()
    keep = ckpt.policies.Any(KeepLast(1), KeepBest("loss", "min"))
    m = manager(tmp_path, toy.state, save=EverySteps(1), when_busy="wait", keep=keep)
    for step, loss in enumerate([math.nan, 0.5, 0.2, math.inf, 0.7, 0.9], start=1):
        toy.train()
        m.step(step, {"loss": loss})
        m.drain(30)
    m.close()
    assert steps(tmp_path) == [6, 3]


def test_steps_are_ordered_as_numbers(tmp_path):
    toy = Toy()
    m = manager(tmp_path, toy.state, save=Never(), keep=KeepLast(2))
    for step in (8, 9, 10, 11, 99, 100):
        toy.train()
        m.save(step, wait=True)
    m.close()
    assert steps(tmp_path) == [100, 99]


def test_a_resumed_run_goes_on_bit_for_bit_and_records_its_parent(tmp_path):
    gold = Toy()
    losses = [gold.train() for _ in range(12)]
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(5))
    assert m.restore() is None
    for step in range(1, 8):
        toy.train()
        m.step(step)
        m.drain(30)
    m.close(save=False)
    again = Toy(seed=1)
    state = again.state
    m = manager(tmp_path, state, save=EverySteps(5))
    found = m.restore()
    assert found.step == 5 and state["count"] == {"step": 5}
    again.count = state["count"]
    for _ in range(5):
        torch.randn(16, 8, generator=again.generator)
    assert [again.train() for _ in range(5, 12)] == losses[5:]
    m.step(12)
    m.close()
    checkpoint = ckpt.checkpoints(str(tmp_path / "run"))[0]
    assert (checkpoint.step, checkpoint.launch) == (12, 2)
    assert checkpoint.manifest.parent["step"] == 5
    assert same(stored(tmp_path), copy_of(gold.state))


def test_a_step_that_saves_nothing_costs_microseconds(tmp_path):
    import timeit

    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(10**6))
    toy.train()
    m.step(1)
    m.drain(30)
    best = min(timeit.repeat(lambda: m.step(2), number=200, repeat=20)) / 200
    m.close(save=False)
    assert best < 100e-6


def test_wrong_options_are_refused_before_anything_is_made(tmp_path):
    for wrong in ({"when_busy": "perhaps"}, {"slots": 0}, {"max_failed_saves": 0}, {"digest": "md5"}):
        with pytest.raises(StateError):
            manager(tmp_path, {}, **wrong)
    assert not (tmp_path / "run").exists()


def test_a_stop_is_agreed_at_once_on_one_rank(tmp_path):
    m = manager(tmp_path, Toy().state)
    assert not m.stop_agreed(0)
    m.request_stop()
    assert m.stop_agreed(0)
    m.close(save=False)


def test_draining_gives_up_after_its_time(tmp_path, faults_on):
    faults_on({"match": "writer:pwrite:", "nth": 1, "do": "delay", "seconds": 1.5})
    toy = Toy()
    m = manager(tmp_path, toy.state, save=EverySteps(1))
    toy.train()
    m.step(1)
    start = time.monotonic()
    with pytest.raises(StorageError, match="goes on alone"):
        m.drain(0.3)
    assert time.monotonic() - start < 1.2
    m.drain(30)
    m.close(save=False)
    assert steps(tmp_path) == [1]


def test_an_error_of_the_storage_names_the_run(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError):
        manager(tmp_path, {})


def test_what_may_change_bits_is_named_when_a_run_is_resumed_under_other_conditions(tmp_path, monkeypatch):
    from ckpt import environment

    m = manager(tmp_path, {"x": 1})
    m.save(1, wait=True)
    m.close()
    now = environment.environment()
    monkeypatch.setattr(environment, "environment", lambda: {**now, "threads": 99, "host": "another"})
    m = manager(tmp_path, {"x": 1})
    m.restore()
    m.close(save=False)
    assert [line for line in m.said if "bits" in line and f"threads was {now['threads']}, is 99" in line]
    assert not any("host" in line for line in m.said)


def test_a_small_disk_is_warned_of_before_the_first_step(tmp_path, monkeypatch):
    from ckpt.stores.folder import FolderStore

    monkeypatch.setattr(FolderStore, "free", lambda _: 30_000)
    toy = Toy()
    m = manager(tmp_path, toy.state, keep=KeepLast(10))
    assert any("free at" in line and "keeping 10" in line for line in m.said)
    m.close(save=False)


def test_a_closed_manager_frees_its_run_and_says_how_the_launch_ended(tmp_path):
    for number, (save, outcome) in enumerate([(True, "finished"), (False, "preempted")], start=1):
        m = manager(tmp_path, {"x": 1})
        m.step(number)
        m.close(save=save)
        assert list_launches(m.run.store)[-1].end["outcome"] == outcome
    m = manager(tmp_path, {"x": 1})
    m.finish("failed", "because")
    m.close(save=False)
    end = list_launches(m.run.store)[-1].end
    assert (end["outcome"], end["cause"]) == ("failed", "because")
