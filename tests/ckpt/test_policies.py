import datetime as dt
import math

import pytest

from ckpt.checkpoint import Fact
from ckpt.policies import (
    All,
    Any,
    Continuous,
    EveryMinutes,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    Now,
    OverheadBudget,
    YoungDaly,
)


def history(*steps, launch=1, metrics=None):
    """Facts, newest first."""
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    facts = [Fact(f"s{step}", step, launch, (metrics or {}).get(step, {}), at) for step in steps]
    return sorted(facts, key=lambda fact: fact.step, reverse=True)


def saved(policy, steps):
    done, previous = [], None
    for step in steps:
        if policy.should_save(Now(step, previous)):
            done.append(step)
        previous = step
    return done


def test_every_steps_saves_at_its_multiples_also_when_steps_are_jumped_over():
    assert saved(EverySteps(5), range(17)) == [5, 10, 15]
    assert saved(EverySteps(5), [3, 6, 9, 12]) == [6, 12]
    assert not EverySteps(5).should_save(Now(5, previous_step=5))


def test_every_minutes_goes_by_the_time_since_the_last_save_began():
    assert not EveryMinutes(1).should_save(Now(1, since_last_s=59.9))
    assert EveryMinutes(1).should_save(Now(1, since_last_s=60))


def test_an_overhead_budget_is_kept():
    policy = OverheadBudget(percent=2)
    cost = {"cost_s": 0.5, "durable_s": 3.0}
    assert not policy.should_save(Now(9, since_last_s=24, **cost))
    assert policy.should_save(Now(9, since_last_s=25, **cost))
    assert not policy.should_save(Now(9, since_last_s=100, in_flight=True, **cost))
    assert not policy.should_save(Now(9, since_last_s=2.9, cost_s=0.001, durable_s=3.0))
    overspent = {"spent_s": 4.5, "trained_s": 249.0, **cost}
    assert not policy.should_save(Now(9, since_last_s=99, **overspent))
    assert policy.should_save(Now(9, since_last_s=100, **overspent))
    assert policy.should_save(Now(9, since_last_s=25, **overspent | {"trained_s": 250.0}))


def test_young_daly_gives_the_published_interval():
    policy = YoungDaly(mtbf_hours=11135 / 3600)
    assert policy.interval_s(1.0) == pytest.approx(149, abs=0.5)
    assert policy.interval_s(60.0) == pytest.approx(1156, abs=0.5)
    assert policy.interval_s(10**6) == pytest.approx(11135)
    assert policy.should_save(Now(1, since_last_s=150, cost_s=1.0))
    assert not policy.should_save(Now(1, since_last_s=148, cost_s=1.0))


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 60.0, 360.0])
def test_no_interval_wastes_much_less_than_young_daly_s(cost_s):
    mtbf = 3600.0

    def waste(interval_s):  # with failures at random: what is not lost to saves or trained again, left out
        return 1 - (interval_s - cost_s) / (mtbf * math.expm1(interval_s / mtbf))

    ours = YoungDaly(mtbf_hours=1).interval_s(cost_s)
    assert waste(ours) < 1.01 * min(waste(ours * factor / 100) for factor in range(50, 300))


def test_continuous_saves_as_soon_as_the_last_save_is_durable():
    assert Continuous().should_save(Now(1))
    assert not Continuous().should_save(Now(1, in_flight=True))
    assert not Continuous(min_s=10).should_save(Now(1, since_last_s=9))


def test_save_policies_combine():
    both = (EverySteps(2), EverySteps(3))
    assert saved(Any(*both), range(1, 8)) == [2, 3, 4, 6]
    assert saved(All(policies=both), range(1, 8)) == [6]


def test_the_newest_are_kept_by_number_and_minus_one_or_none_keeps_all():
    facts = history(8, 9, 10, 11)
    assert KeepLast(2).keep(facts) == {"s10", "s11"}
    assert KeepLast(-1).keep(facts) == KeepLast(None).keep(facts) == {"s8", "s9", "s10", "s11"}
    for wrong in (0, -2, True, 1.5):
        with pytest.raises(ValueError, match="KeepLast"):
            KeepLast(wrong)


def test_nan_and_infinity_and_nothing_are_never_best_and_never_in_the_way():
    scores = [math.nan, 0.5, math.nan, 0.4, -math.inf]
    metrics = {step: {"loss": score} for step, score in enumerate(scores, start=1)} | {6: {}}
    facts = history(*range(1, 7), metrics=metrics)
    assert KeepBest("loss", "min").keep(facts) == {"s4"}
    assert KeepBest("loss", "max").keep(facts) == {"s2"}
    assert KeepBest("loss", "min", n=9).keep(facts) == {"s2", "s4"}
    assert KeepBest("loss", "min").keep(history(1, metrics={1: {"loss": math.nan}})) == set()


def test_a_direction_has_to_be_stated_rightly():
    for wrong in ("", "maximum", "lower", None):
        with pytest.raises(ValueError, match="direction"):
            KeepBest("eval_set-b_loss", wrong)
    with pytest.raises(TypeError):
        KeepBest("eval_set-b_loss")


def test_keep_policies_combine():
    facts = history(1, 2, 3, 4, metrics={1: {"m": 0.1}, 2: {"m": 0.9}})
    assert Any(KeepLast(1), KeepBest("m", "min")).keep(facts) == {"s4", "s1"}
    assert All(KeepLast(3), KeepEvery(2)).keep(facts) == {"s4", "s2"}
    for wrong in ((), (3,)):
        with pytest.raises(ValueError):
            Any(*wrong)


def test_numbers_that_make_no_sense_are_refused():
    for make in (EverySteps, EveryMinutes, OverheadBudget, YoungDaly, KeepEvery):
        for wrong in (0, -1, math.nan, math.inf, True, "5"):
            with pytest.raises(ValueError):
                make(wrong)
