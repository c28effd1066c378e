import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from ckpt.errors import StateError
from ckpt.flatten import extract, flatten, parameter_names, put_back
from ckpt.values import TensorRef


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def forward(self, x):
        return self.module(self.other(x))


def trained(model, make=torch.optim.AdamW):
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return optimizer


def unchanged(flat):
    return flat.quick.same() and flat.thorough.same()


def keys(state):
    return sorted(flatten(state).tensors)


def test_keys_never_carry_the_names_of_wrappers_at_any_depth():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    expected = keys({"model": plain})
    assert expected == ["model.0.bias", "model.0.weight", "model.1.0.bias", "model.1.0.weight"]
    inside = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.Linear(2, 2))))
    for wrapped in (
        torch.compile(plain),
        nn.DataParallel(plain),
        nn.DataParallel(torch.compile(plain)),
        inside,
    ):
        assert keys({"model": wrapped}) == expected
    averaged = keys({"model": AveragedModel(plain)})
    assert averaged == sorted([*expected, "model.n_averaged"])


def test_a_child_that_a_user_calls_module_keeps_its_name():
    assert keys({"m": Block()}) == ["m.module.bias", "m.module.weight", "m.other.bias", "m.other.weight"]


def test_optimizer_state_is_named_by_its_parameters_names():
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = torch.compile(model)
    optimizer = trained(model)
    flat = flatten({"model": wrapped, "optim": optimizer})
    assert "optim.state.0.weight.exp_avg" in flat.tensors
    assert flat.tensors["optim.state.0.weight.exp_avg"].tensor is optimizer.state[model[0].weight]["exp_avg"]
    assert flat.values["optim/params"] == [["0.weight", "0.bias"]]
    assert flat.values["optim"]["param_groups"][0]["lr"] == 0.1
    assert parameter_names({"model": wrapped, "optim": optimizer}) == {"optim": [["0.weight", "0.bias"]]}


def test_one_optimizer_over_two_modules_tells_their_parameters_apart():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = trained(nn.Sequential(a, b))
    found = keys({"a": a, "b": b, "optim": optimizer})
    assert "optim.state.a.weight.exp_avg" in found and "optim.state.b.weight.exp_avg" in found


def test_flattening_neither_steps_an_optimizer_nor_changes_its_state():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.detach().clone()
    flat = flatten({"model": model, "optim": optimizer})
    assert not optimizer.state and torch.equal(model.weight, before)
    assert not any(key.startswith("optim.") for key in flat.tensors)


def test_tied_weights_are_stored_once_with_their_other_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    flat = flatten({"model": model})
    assert flat.aliases == {"model.1.weight": "model.0.weight"}
    assert "model.1.weight" not in flat.tensors


def test_parameters_may_wait_and_everything_else_is_copied_at_the_call():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {"model": model, "optim": trained(model), "x": {"t": torch.ones(2)}}
    kinds = {key: entry.kind for key, entry in flatten(state).tensors.items()}
    assert kinds["model.0.weight"] == kinds["optim.state.0.weight.exp_avg"] == "step"
    assert kinds["model.1.running_mean"] == kinds["x.t"] == "call"


def test_a_tensor_learning_rate_is_stored_as_a_tensor():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    flat = flatten({"m": model, "o": optimizer})
    assert flat.tensors["o.param_groups.0.lr"].kind == "call"
    assert flat.values["o"]["param_groups"][0]["lr"] == TensorRef("o.param_groups.0.lr")


def test_what_hooks_and_extra_state_add_is_evaluated_anew_at_every_save():
    class Extra(nn.Linear):
        count = 0

        def get_extra_state(self):
            self.count += 1
            return {"n": self.count, "t": torch.full((1,), self.count)}

        def set_extra_state(self, state):
            self.count = state["n"]

    model = nn.Sequential(Extra(2, 2))
    model.register_state_dict_post_hook(lambda m, sd, *_: sd.update({"0.sum": m[0].weight.detach().sum()}))
    flat = flatten({"m": model})
    first, second = flat.collect(), flat.collect()
    assert first.values["m"]["extra_state"]["0"]["n"] < second.values["m"]["extra_state"]["0"]["n"]
    assert second.tensors["m.extra_state.0.t"].item() == second.values["m"]["extra_state"]["0"]["n"]
    with torch.no_grad():
        model[0].weight.add_(1)
    assert flat.collect().tensors["m.evaluated.0.sum"] == model[0].weight.sum()


def test_a_parametrized_module_keeps_its_original_parameters():
    found = keys({"m": weight_norm(nn.Linear(2, 2))})
    assert "m.parametrizations.weight.original0" in found and "m.weight" not in found


def test_each_rank_names_what_is_its_own():
    class Own:
        per_rank = True

        def state_dict(self):
            return {"t": torch.ones(1), "n": 1}

        def load_state_dict(self, state):
            pass

    flat = flatten({"own": Own()}, rank=3)
    assert list(flat.tensors) == ["own/rank-00003.t"] and list(flat.values) == ["own/rank-00003"]
    assert flat.tensors["own/rank-00003.t"].per_rank


def test_structure_changes_are_seen_without_walking_the_model():
    def fresh():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = trained(model)
        state = {"model": model, "optim": optimizer, "x": 1}
        return state, model, optimizer, flatten(state)

    for change in (
        lambda s, m, o: m.add_module("new", nn.Linear(1, 1)),
        lambda s, m, o: m.__setitem__(0, nn.Linear(2, 2)),
        lambda s, m, o: setattr(m[0], "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda s, m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda s, m, o: o.state.pop(m[0].weight),
        lambda s, m, o: o.state[m[0].weight].__setitem__("exp_avg", torch.zeros(2, 2)),
        lambda s, m, o: s.update(y=2),
    ):
        state, model, optimizer, flat = fresh()
        assert unchanged(flat)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        assert unchanged(flat)
        change(state, model, optimizer)
        assert not unchanged(flat)


def test_a_buffer_that_is_replaced_is_found_again():
    model = nn.BatchNorm1d(2)
    flat = flatten({"m": model})
    model.running_mean = torch.full((2,), 7.0)
    now = flat.collect()
    assert flat.fits(now) and now.tensors["m.running_mean"].tolist() == [7.0, 7.0]
    model.running_mean = torch.zeros(3)
    assert not flat.fits(flat.collect())


def test_tensors_inside_containers_are_taken_out_and_put_back():
    tree = {"a": [torch.ones(1), (2, torch.zeros(2))], "a.0": torch.full((1,), 5.0), 3: "x"}
    out = {}
    plain = extract(tree, "e", out)
    assert plain["a"][1][0] == 2 and isinstance(plain["a"][0], TensorRef)
    assert len(out) == 3
    back = put_back(plain, out)
    assert torch.equal(back["a"][1][1], torch.zeros(2)) and back["a.0"].item() == 5.0
    assert isinstance(back["a"][1], tuple) and back[3] == "x"


def test_what_no_file_can_hold_is_refused_by_name():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for bad in (quantized, torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(StateError, match=r"deep\.1"):
            flatten({"deep": [1, bad]})
    with pytest.raises(StateError, match=r"net\.weight.*forward"):
        flatten({"net": nn.LazyLinear(2)})


def test_an_optimizer_that_keeps_state_elsewhere_is_refused():
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "beside": 1}

    with pytest.raises(StateError, match="beside"):
        flatten({"o": Odd(nn.Linear(1, 1).parameters(), lr=1.0)})
