from itertools import pairwise

import pytest
import torch

from training import hyper
from training.optim import adamw
from training.schedules import constant, multistep, warmup_cosine


def test_warmup_rises_to_the_full_rate_and_the_cosine_falls_to_the_floor():
    factors = [warmup_cosine(100, warmup=10, floor=0.1)(step) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1.0
    assert all(a > b for a, b in pairwise(factors[10:]))
    assert factors[100] == pytest.approx(0.1)
    assert warmup_cosine(100, 10, 0.1)(500) == pytest.approx(0.1)


def test_multistep_falls_at_each_milestone():
    factors = [multistep([6, 11], gamma=0.5)(step) for step in (0, 5, 6, 10, 11, 99)]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert constant()(7) == 1.0


def test_a_floor_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match=r"schedule.floor=5"):
        warmup_cosine(100, floor=5)


def made(**options):
    optimizer = adamw(torch.nn.Linear(2, 2), **options)
    hyper.remember_base(optimizer)
    return optimizer


def test_n3_a_changed_option_acts_and_is_listed_while_others_stay_as_saved():
    before = {"_target_": "training.optim.adamw", "lr": 0.1, "weight_decay": 0.2}
    resumed = made(lr=0.1, weight_decay=0.2)
    resumed.param_groups[0]["eps"] = 3e-8  # as if the optimizer had moved it
    now = {**before, "lr": 0.01}
    lines = hyper.apply_changes(resumed, hyper.options(made(lr=0.01, weight_decay=0.2)), before, now)
    assert lines == ["optim.lr was 0.1 and is 0.01 now"]
    assert hyper.apply_schedule(resumed, multistep([5], 0.5), 7) == 0.005
    assert resumed.param_groups[0]["eps"] == 3e-8
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.2, 0.0]


def test_an_unchanged_configuration_touches_nothing():
    optimizer = made(lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 7.0
    assert hyper.apply_changes(optimizer, hyper.options(made(lr=0.1)), {"lr": 0.1}, {"lr": 0.1}) == []
    assert optimizer.param_groups[0]["initial_lr"] == 7.0
