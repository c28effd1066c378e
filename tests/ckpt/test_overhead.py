"""What saving costs is measured honestly, and policies that spend by it keep to what they were given."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.deciding import Decider
from ckpt.overhead import Slowdown
from ckpt.policies import Continuous, OverheadBudget, YoungDaly
from ckpt.stats import SaveCosts, Tally
from ckpt.team import Solo


class Training:
    """Steps and saves in invented time: `run` trains for some seconds, and `saves` holds when each began.

    A save holds training for `held` seconds, is durable after `durable` seconds, and slows the steps until
    then by about `slowed` seconds; each may be a function of the save's number. `fails` says which fail.
    """

    def __init__(
        self, policy, step_s=1.0, held=0.1, slowed=0.0, durable=3.0, noise=0.0, fails=lambda n: False
    ):
        self.now, self.saves, self.tally, self.random = 0.0, [], Tally(), random.Random(1)
        self.step_s, self.noise, self.fails = step_s, noise, fails
        self.held, self.slowed, self.durable = (self.law(law) for law in (held, slowed, durable))
        self.flight, self.lost = None, 0.0
        self.settler = SimpleNamespace(
            fenced=None, bad_in_a_row=0, retry=False, last_failure="", take_replan=lambda: False
        )
        self.settler.in_flight = lambda: [self.flight] if self.flight else []
        self.settler.free_slot = lambda slots: None if self.flight else 0
        self.decider = Decider(
            policy,
            Solo(),
            self.settler,
            self.tally,
            slots=1,
            when_busy="skip",
            max_failed=10**9,
            skipped=lambda step: None,
            clock=lambda: self.now,
        )

    @staticmethod
    def law(given):
        return given if callable(given) else lambda number: given

    def run(self, seconds):
        step, until = 0, self.now + seconds
        while self.now < until:
            step += 1
            if self.decider.decide(step, step - 1).token:
                self.begin(step)
            self.take(self.step_s * self.random.lognormvariate(0, self.noise))
        return self

    def begin(self, step):
        assert self.flight is None, "two saves in flight"
        number = len(self.saves)
        self.decider.began()
        self.tally.add(begun=1, backlog=1, stall_s=self.held(number))
        self.flight = SimpleNamespace(at=self.now, step=step, number=number)
        self.saves.append(self.now)
        self.lost += self.held(number)
        self.now += self.held(number)

    def take(self, seconds):
        """One step: forward, backward, and what a save beside it adds."""
        if self.flight:
            more = self.slowed(self.flight.number) * self.step_s / self.durable(self.flight.number)
            self.lost += more
            seconds += more
        self.now += seconds
        if self.flight and self.now - self.flight.at >= self.durable(self.flight.number):
            self.end()

    def end(self):
        flight, self.flight = self.flight, None
        if self.fails(flight.number):
            self.settler.bad_in_a_row += 1
            self.tally.add(backlog=-1, failed=1)
            return
        self.settler.bad_in_a_row = 0
        durable_s = self.now - flight.at
        self.tally.committed(SaveCosts(step=flight.step, attempt="a", durable_s=durable_s))

    @property
    def pauses(self):
        return [later - earlier for earlier, later in zip(self.saves, self.saves[1:], strict=False)]


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 10), st.floats(0.3, 8), st.floats(0, 0.5), st.integers(1, 40), st.integers(0, 99))
def test_what_steps_take_longer_beside_a_save_is_estimated_whatever_a_step_lasts(
    usual, ratio, noise, beside, seed
):
    rng = random.Random(seed)
    slowed = min(ratio, 0.5 * beside) * usual
    meter, told, saves = Slowdown(), 0.0, 60
    for _ in range(saves):
        for _ in range(60):
            meter.step(usual * rng.lognormvariate(0, noise / 2), False)
        for _ in range(beside):
            told += meter.step(usual * rng.lognormvariate(0, noise / 2) + slowed / beside, True)
    # Five standard errors; the usual step is itself known from a hundred only.
    error = 5 * usual * noise * math.sqrt(beside + beside**2 / 60) / math.sqrt(saves)
    assert told / saves == pytest.approx(slowed, rel=0.25, abs=error + 1e-9)


def test_a_save_that_slows_nothing_costs_what_it_holds_training_for():
    quiet = Training(OverheadBudget(1), held=0.1, noise=0.1).run(6 * 3600)
    stats = quiet.tally.now
    assert len(quiet.saves) > 1000
    assert stats.held_s <= stats.lost_s < 1.2 * stats.held_s
    assert stats.overhead_percent == pytest.approx(100 * 0.1 * len(quiet.saves) / quiet.now, rel=0.01)


def test_a_save_that_slows_the_steps_beside_it_is_found_out():
    slow = Training(OverheadBudget(1), held=0.02, slowed=0.6, noise=0.1).run(6 * 3600)
    assert slow.lost / len(slow.saves) > 0.5
    assert slow.tally.now.lost_s == pytest.approx(slow.lost, rel=0.2)


def test_steps_that_are_slow_now_and_then_anyway_are_no_cost():
    meter, rng, told = Slowdown(), random.Random(3), 0.0
    for number in range(6000):
        seconds = 1.8 if rng.random() < 0.1 else 1.0
        told += meter.step(seconds, beside_a_save=number % 100 >= 80)
    assert abs(told) < 0.03 * 1200


def test_an_evaluation_beside_a_save_is_not_taken_for_its_cost():
    meter = Slowdown()
    for _ in range(50):
        meter.step(0.1, False)
    assert meter.step(30.0, True) <= 0.1 + 1e-9
    assert Slowdown().step(30.0, True) == 0.0


COSTS = {
    "steady": lambda n: 0.3,
    "growing": lambda n: 0.1 * 1.01 ** min(n, 300),
    "falling": lambda n: max(0.1, 2.0 / (n + 1)),
    "one bad moment in ten": lambda n: 2.0 if n % 10 == 4 else 0.1,
    "two kinds": lambda n: (0.05, 0.5)[n % 2],
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("where", ["held", "slowed"])
@pytest.mark.parametrize("percent", [0.5, 5])
def test_an_overhead_budget_is_kept_for_hours_and_used(cost, where, percent):
    how = {"held": 0.001, "durable": 6, where: cost}
    run = Training(OverheadBudget(percent, first_s=30), step_s=2.0, noise=0.02, **how).run(4 * 3600)
    assert run.saves[0] == pytest.approx(30, abs=3)
    share = 100 * run.lost / run.now
    assert share < percent * (1.01 if where == "held" else 1.05)
    as_often_as_can_be = sum(run.pauses) / len(run.pauses) < 10
    assert share > 0.5 * percent or as_often_as_can_be


def test_one_save_that_met_a_bad_moment_leaves_no_hours_unprotected():
    run = Training(OverheadBudget(1), held=lambda n: 60.0 if n == 40 else 0.1).run(4 * 3600)
    assert max(run.pauses[:40]) < 20
    assert max(run.pauses[40:]) < 70


def test_what_a_failed_save_cost_is_spent_but_is_not_what_a_save_costs():
    costs = set()

    class Watching(OverheadBudget):
        def should_save(self, now):
            costs.add(now.cost_s and round(now.cost_s, 2))
            return super().should_save(now)

    run = Training(Watching(1), held=lambda n: (2.0, 0.1)[n % 2], fails=lambda n: n % 2 == 0).run(3600)
    assert costs == {None, 0.1}
    assert run.tally.now.held_s == pytest.approx(run.lost)


@pytest.mark.parametrize(
    "policy", [OverheadBudget(5, first_s=20), YoungDaly(0.001, first_s=20), Continuous()]
)
def test_storage_that_fails_is_not_tried_without_a_pause(policy):
    never = Training(policy, held=0.01, fails=lambda n: True).run(600)
    assert len(never.saves) <= 60
    later = Training(policy, held=0.01, fails=lambda n: 5 <= n < 10).run(600)
    assert min(later.pauses[5:10]) >= 10
    assert len(later.saves) > 12


def test_young_daly_saves_at_its_interval():
    run = Training(YoungDaly(24), held=2.0, durable=40).run(6 * 3600)
    assert run.pauses[3:] == pytest.approx([math.sqrt(2 * 2 * 86400)] * len(run.pauses[3:]), abs=2)


def test_a_short_interval_waits_until_the_last_save_is_durable():
    for policy in (Continuous(), YoungDaly(0.001, first_s=1), OverheadBudget(50, first_s=1)):
        run = Training(policy, held=0.01, durable=12.5).run(600)
        assert min(run.pauses) >= 12.5
        assert run.tally.now.skipped == 0


def test_numbers_of_a_snapshot_stay():
    tally = Tally()
    before = tally.now
    tally.add(begun=1, backlog=1, stall_s=0.5)
    tally.committed(SaveCosts(step=1, attempt="a", stall_s=0.5, stage_s=2.0, bytes=7))
    assert (before.begun, before.stall_s, before.last) == (0, 0.0, None)
    assert (tally.now.stall_s, tally.now.stage_s, tally.now.bytes) == (0.5, 2.0, 7)
    assert tally.now.last == replace(tally.now.last, step=1)
