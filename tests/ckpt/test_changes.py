"""What may happen to a state between saves: every checkpoint holds what was live, or there is none."""

import collections
import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

import ckpt
from ckpt.values import decode
from tests.ckpt.managing import manager


class Always:
    def should_save(self, now):
        return True


class Never:
    def should_save(self, now):
        return False


def saved(tmp_path, prefix):
    found = ckpt.latest_valid(str(tmp_path / "run"))
    return ckpt.load_tensors(found, prefix=prefix)


def save_again(made, step, tries=3):
    """Save until an attempt is not void: a state that was seen to have moved is saved at the next try."""
    for _ in range(tries):
        try:
            made.save(step, wait=True)
            return
        except ckpt.CheckpointError:
            continue
    raise AssertionError(f"step {step} was never committed: {made.said}")


def trained(width=3):
    net = nn.Linear(width, width)
    optim = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optim)
    return net, optim


def train(net, optim):
    optim.zero_grad()
    net(torch.randn(1, net.in_features)).square().sum().backward()
    optim.step()


@pytest.mark.parametrize("how", ["load_state_dict", "state replaced", "param_groups replaced"])
def test_an_optimizer_that_was_rolled_back_by_hand_is_saved_as_it_is(tmp_path, how):
    net, optim = trained()
    before = copy.deepcopy(optim.state_dict())
    with_manager = manager(tmp_path, {"net": net, "optim": optim}, save=Never())
    for step in range(1, 4):
        train(net, optim)
        with_manager.step(step)
    with_manager.save(3, wait=True)
    if how == "load_state_dict":
        optim.load_state_dict(before)
    elif how == "state replaced":
        optim.state = collections.defaultdict(dict)
    else:
        optim.param_groups = copy.copy(optim.param_groups)
        optim.param_groups[0] = {**optim.param_groups[0], "params": list(net.parameters())[::-1]}
    train(net, optim)
    save_again(with_manager, 4)
    with_manager.close()
    there = saved(tmp_path, "optim.state.")
    for name, parameter in net.named_parameters():
        for slot, value in optim.state[parameter].items():
            assert torch.equal(there[f"{name}.{slot}"], value), (name, slot)


def test_an_entry_that_was_replaced_is_saved_as_it_is(tmp_path):
    net, optim = trained()
    state = {"net": net, "optim": optim}
    made = manager(tmp_path, state, save=Never())
    made.save(1, wait=True)
    state["net"], state["optim"] = trained()
    state["optim"].param_groups[0]["lr"] = 0.5
    made.save(2, wait=True)
    made.close()
    found = ckpt.latest_valid(str(tmp_path / "run"))
    assert torch.equal(ckpt.load_tensors(found, prefix="net.")["weight"], state["net"].weight)
    assert decode(found.manifest.values["optim"])["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.t(),
        lambda w: w[:32],
        lambda w: w.view(32, 128),
        lambda w: w.view(torch.int32),
        lambda w: w.clone().view(32, 128),
        lambda w: torch.randn(64, 64),
    ],
    ids=["transposed", "shorter", "reshaped", "retyped", "moved and reshaped", "moved"],
)
def test_data_that_was_exchanged_is_saved_with_its_own_shape(tmp_path, other):
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.randn(64, 64), requires_grad=False))
    made = manager(tmp_path, {"net": net}, save=Never())
    made.save(1, wait=True)
    net.weight.data = other(net.weight.data)
    save_again(made, 2)
    made.close()
    assert torch.equal(saved(tmp_path, "net.")["weight"], net.weight)


def test_tensors_that_were_tied_and_are_no_more_are_saved_apart(tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    net["b"].weight.data = net["a"].weight.data
    made = manager(tmp_path, {"net": net}, save=Never())
    made.save(1, wait=True)
    net["b"].weight.data = torch.ones(3, 3)
    save_again(made, 2)
    made.close()
    there = saved(tmp_path, "net.")
    assert torch.equal(there["b.weight"], torch.ones(3, 3))
    assert torch.equal(there["a.weight"], net["a"].weight)


def test_weights_that_were_live_for_the_call_only_are_saved_or_nothing_is(tmp_path):
    net = nn.Linear(1024, 1024, bias=False)
    made = manager(tmp_path, {"net": net}, save=ckpt.EverySteps(2), when_busy="wait")
    made.save(1, wait=True)
    raw = net.weight.data
    net.weight.data = torch.full((1024, 1024), 9.0)
    made.step(2)
    net.weight.data = raw
    made.close(save=False)
    found = ckpt.latest_valid(str(tmp_path / "run"))
    assert found.step == 1 or bool((ckpt.load_tensors(found, prefix="net.")["weight"] == 9).all())


def test_memory_that_was_given_back_is_not_read(tmp_path):
    net = nn.Linear(400, 600)
    made = manager(tmp_path, {"net": net}, save=Never())
    made.save(1, wait=True)
    old = net.weight.data
    net.weight.data = torch.randn(600, 400)
    old.untyped_storage().resize_(0)
    save_again(made, 2)
    made.close()
    assert torch.equal(saved(tmp_path, "net.")["weight"], net.weight)


class Late(torch.optim.SGD):
    """Has a slot that is a tensor from its third step on only."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["late"] = torch.ones(2) if self.steps > 2 else None
        return super().step(closure)


def test_a_slot_that_becomes_a_tensor_later_is_saved(tmp_path):
    net = nn.Linear(3, 3)
    optim = Late(net.parameters(), lr=0.1)
    made = manager(tmp_path, {"net": net, "optim": optim}, save=ckpt.EverySteps(1), when_busy="wait")
    for step in range(1, 6):
        train(net, optim)
        made.step(step)
    made.close()
    assert torch.equal(saved(tmp_path, "optim.")["state.weight.late"], torch.ones(2))


def test_a_buffer_that_is_none_from_now_on_is_left_out(tmp_path):
    net = nn.BatchNorm1d(3)
    made = manager(tmp_path, {"net": net}, save=Never())
    made.save(1, wait=True)
    net.running_mean = None
    made.save(2, wait=True)
    made.close()
    assert "running_mean" not in saved(tmp_path, "net.")


def test_what_cannot_be_stored_is_named_at_the_first_step_not_at_the_first_save(tmp_path):
    made = manager(tmp_path, {"thing": {"f": object()}}, save=ckpt.EverySteps(1000))
    with pytest.raises(ckpt.StateError, match=r"thing\.f"):
        made.step(1)
    made.close(save=False)


@pytest.mark.parametrize("where", ["put", "append"])
def test_an_interrupt_while_a_save_begins_leaves_no_save_hanging(tmp_path, monkeypatch, where):
    net = nn.Linear(3, 3)
    made = manager(tmp_path, {"net": net}, save=Always(), when_busy="wait")
    made.save(1, wait=True)

    class Interrupted:
        def put(self, job):
            raise KeyboardInterrupt

        def append(self, attempt):
            raise KeyboardInterrupt

    saver = made._saver
    if where == "put":
        monkeypatch.setattr(saver, "_jobs", Interrupted())
    else:
        monkeypatch.setattr(made._settler, "add", Interrupted().append)
    with pytest.raises(KeyboardInterrupt):
        made.step(2)
    monkeypatch.undo()
    with suppress(ckpt.StorageError):  # which says what became of step 2
        made.drain(30)
    made.step(3)
    made.close(timeout=30)
    assert ckpt.latest_valid(str(tmp_path / "run")).step == 3
