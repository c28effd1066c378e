"""Optimizers come back as they were: slots, counters, options; whatever their kind."""

import pytest
import torch
from torch import nn

from ckpt.errors import StateError
from ckpt.restore import restore_into
from ckpt.run import open_run
from tests.ckpt.restoring import fingerprint, same_bits, save, small, tensors_of, train


def restore(path, state, **options):
    return restore_into(open_run(str(path), create=False), state, **options)


def net(seed, **kind):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(**kind)


def step(model, optim, seed):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.dtype)

    def loss():
        optim.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    return optim.step(loss).item()


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path, kind):
    gold, stopped, resumed = net(1), net(1), net(2)
    gold_optim, stopped_optim, optim = (KINDS[kind](m.parameters()) for m in (gold, stopped, resumed))
    for n in range(3):
        step(gold, gold_optim, n)
        step(stopped, stopped_optim, n)
    save(tmp_path / "r", {"model": stopped, "optim": stopped_optim}, 3)
    restore(tmp_path / "r", {"model": resumed, "optim": optim})
    assert [step(resumed, optim, n) for n in range(3, 6)] == [step(gold, gold_optim, n) for n in range(3, 6)]
    one, two = (tensors_of({"model": m, "optim": o}) for m, o in ((gold, gold_optim), (resumed, optim)))
    assert one.keys() == two.keys()
    assert all(same_bits(one[key], two[key]) for key in one)


def test_moments_keep_their_dtype_where_load_state_dict_would_cast(tmp_path):
    model = net(1, dtype=torch.bfloat16)
    optim = torch.optim.AdamW(model.parameters(), 0.01)
    for p in model.parameters():
        optim.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    save(tmp_path / "r", {"model": model, "optim": optim}, 1)
    other = net(2, dtype=torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters(), 0.01)
    restore(tmp_path / "r", {"model": other, "optim": fresh})
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            assert same_bits(optim.state[p][slot], fresh.state[q][slot])
        assert fresh.state[q]["exp_avg"].dtype is torch.float32


def test_no_step_is_run_and_no_hook_fires(tmp_path):
    save(tmp_path / "r", small(1), 1)
    state = small(2)
    fired = []
    state["optim"].register_step_pre_hook(lambda *_: fired.append("step"))
    state["optim"].register_load_state_dict_pre_hook(lambda *_: fired.append("load"))
    restore(tmp_path / "r", state)
    assert fired == []
    assert state["optim"].state == {}


def test_slots_that_exist_are_filled_in_place(tmp_path):
    saved, state = small(1), small(2)
    train(saved, 2)
    train(state, 5)
    save(tmp_path / "r", saved, 2)
    weight = state["model"][0].weight
    before = {slot: (id(t), t.data_ptr()) for slot, t in state["optim"].state[weight].items()}
    restore(tmp_path / "r", state)
    assert before == {slot: (id(t), t.data_ptr()) for slot, t in state["optim"].state[weight].items()}
    assert fingerprint(state) == fingerprint(saved)


def test_a_state_from_before_the_first_step_takes_later_slots_away(tmp_path):
    saved, state = small(1), small(2)
    save(tmp_path / "r", saved, 0)
    train(state, 3)
    restore(tmp_path / "r", state)
    assert dict(state["optim"].state) == {}
    assert train(state, 3) == train(saved, 3)


def test_parameters_without_a_step_stay_without_state(tmp_path):
    def made(seed):
        model = net(seed)
        model[0].bias.requires_grad_(False)
        return {"model": model, "optim": torch.optim.Adam(model.parameters(), 0.01)}

    saved, state = made(1), made(2)
    step(saved["model"], saved["optim"], 0)
    save(tmp_path / "r", saved, 1)
    restore(tmp_path / "r", state)
    assert state["model"][0].bias not in state["optim"].state
    assert len(state["optim"].state) == 3
    assert step(state["model"], state["optim"], 1) == step(saved["model"], saved["optim"], 1)


def test_options_come_from_the_checkpoint_but_how_to_compute_stays(tmp_path):
    saved, state = small(1), small(2)
    saved["optim"].param_groups[0].update(lr=0.123, betas=(0.8, 0.9))
    save(tmp_path / "r", saved, 1)
    state["optim"].param_groups[0].update(foreach=False, fused=None, capturable=False)
    restore(tmp_path / "r", state)
    group = state["optim"].param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.123, (0.8, 0.9), 0.1)
    assert group["foreach"] is False
    assert state["optim"].param_groups[1]["weight_decay"] == 0.01


def test_a_tensor_learning_rate_is_restored_in_place(tmp_path):
    saved, state = small(1), small(2)
    for s, lr in ((saved, 0.5), (state, 0.25)):
        s["optim"].param_groups[1]["lr"] = torch.tensor(lr)
    save(tmp_path / "r", saved, 1)
    rate = state["optim"].param_groups[1]["lr"]
    restore(tmp_path / "r", state)
    assert state["optim"].param_groups[1]["lr"] is rate
    assert rate.item() == 0.5


def test_schedules_go_on_where_they_were(tmp_path):
    def made():
        model = net(1)
        optim = torch.optim.SGD(model.parameters(), 0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optim, 0.1, total_iters=3)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 6)
        sched = torch.optim.lr_scheduler.SequentialLR(optim, [warm, cool], [3])
        return {"model": model, "optim": optim, "sched": sched}

    def go(state, steps):
        rates = []
        for n in range(steps):
            step(state["model"], state["optim"], n)
            state["sched"].step()
            rates.append(state["optim"].param_groups[0]["lr"])
        return rates

    gold = go(made(), 9)
    for stop in (2, 3, 4, 7):
        state = made()
        go(state, stop)
        save(tmp_path / str(stop), state, stop)
        resumed = made()
        restore(tmp_path / str(stop), resumed)
        assert go(resumed, 9 - stop) == gold[stop:]


def test_new_and_gone_options_and_parameters_are_listed(tmp_path):
    save(tmp_path / "r", small(1), 1)
    state = small(2)
    state["optim"].param_groups[0]["novelty"] = 0.5
    del state["optim"].param_groups[1]["amsgrad"]
    before = fingerprint(state)
    with pytest.raises(StateError) as failed:
        restore(tmp_path / "r", state)
    missing, unexpected = str(failed.value).split("unexpected")
    assert "optim.param_groups[0].novelty" in missing
    assert "optim.param_groups[1].amsgrad" in unexpected
    assert fingerprint(state) == before
    said = []
    restore(tmp_path / "r", state, partial=True, say=said.append)
    assert "novelty" in said[0]
    assert state["optim"].param_groups[0]["novelty"] == 0.5


def test_another_kind_of_optimizer_is_refused_and_never_starts_with_moments_at_zero(tmp_path):
    saved = {"model": net(1)}
    saved["optim"] = torch.optim.SGD(saved["model"].parameters(), 0.1)
    step(saved["model"], saved["optim"], 0)
    save(tmp_path / "r", saved, 1)
    state = {"model": net(2)}
    state["optim"] = torch.optim.AdamW(state["model"].parameters(), 0.1)
    with pytest.raises(StateError, match="betas"):
        restore(tmp_path / "r", state)


def test_regrouped_parameters_are_listed(tmp_path):
    def made(*groups):
        model = net(1)
        params = dict(model.named_parameters())
        optim = torch.optim.Adam([{"params": [params[n] for n in names]} for names in groups], 0.1)
        return {"model": model, "optim": optim}

    save(tmp_path / "r", made(["0.weight", "2.weight"], ["0.bias", "2.bias"]), 1)
    with pytest.raises(StateError, match=r"optim\.params\.2\.weight: in param group 0 .* group 1 here"):
        restore(tmp_path / "r", made(["0.weight"], ["0.bias", "2.bias", "2.weight"]))
    with pytest.raises(StateError, match=r"missing(?s:.*)optim\.params\.2\.bias"):
        save(tmp_path / "q", made(["0.weight", "2.weight"], ["0.bias"]), 1)
        restore(tmp_path / "q", made(["0.weight", "2.weight"], ["0.bias", "2.bias"]))


def test_the_order_of_parameters_does_not_matter_but_their_names_do(tmp_path):
    saved, state = {"model": net(1)}, {"model": net(2)}
    saved["optim"] = torch.optim.Adam(saved["model"].parameters(), 0.1)
    step(saved["model"], saved["optim"], 0)
    save(tmp_path / "r", saved, 1)
    state["optim"] = torch.optim.Adam(list(state["model"].parameters())[::-1], 0.1)
    restore(tmp_path / "r", state)
    for p, q in zip(saved["model"].parameters(), state["model"].parameters(), strict=True):
        assert same_bits(saved["optim"].state[p]["exp_avg"], state["optim"].state[q]["exp_avg"])


def test_weights_saved_tied_bring_their_moments_to_both_when_loaded_untied(tmp_path):
    class Model(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            if tied:
                self.b.weight = self.a.weight

    def made(tied):
        model = Model(tied)
        return {"model": model, "optim": torch.optim.Adam(model.parameters(), 0.1)}

    saved, state = made(True), made(False)
    model = saved["model"]
    model.b(model.a(torch.ones(1, 3))).sum().backward()
    saved["optim"].step()
    save(tmp_path / "r", saved, 1)
    restore(tmp_path / "r", state)
    slots = [state["optim"].state[p] for p in state["model"].parameters()]
    assert same_bits(slots[0]["exp_avg"], slots[1]["exp_avg"])
    assert slots[0]["exp_avg"].data_ptr() != slots[1]["exp_avg"].data_ptr()
    assert same_bits(slots[0]["exp_avg"], saved["optim"].state[model.a.weight]["exp_avg"])


def test_a_partial_restore_gives_no_moments_of_another_shape(tmp_path):
    saved = small(1, width=16)
    train(saved, 2)
    save(tmp_path / "r", saved, 2)
    state = small(2, width=12)
    restore(tmp_path / "r", state, partial=True, say=lambda _: None)
    assert state["model"][0].weight not in state["optim"].state
    assert state["model"][2].bias in state["optim"].state
    train(state, 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": False}])
def test_counters_lie_where_the_optimizers_kernels_read_them(tmp_path, options):
    def made(seed):
        model = net(seed).cuda()
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), 0.01, **options)}

    def go(state):
        state["optim"].zero_grad()
        loss = state["model"](torch.ones(3, 4, device="cuda")).square().mean()
        loss.backward()
        state["optim"].step()
        return loss.item()

    saved, state = made(1), made(2)
    go(saved)
    save(tmp_path / "r", saved, 1)
    restore(tmp_path / "r", state)
    for p, q in zip(saved["model"].parameters(), state["model"].parameters(), strict=True):
        for slot, tensor in saved["optim"].state[p].items():
            assert state["optim"].state[q][slot].device == tensor.device
            assert same_bits(state["optim"].state[q][slot], tensor)
    assert [go(state) for _ in range(3)] == [go(saved) for _ in range(3)]
