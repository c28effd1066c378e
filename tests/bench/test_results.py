"""What is made of the samples: statistics, what discards a run, and the verdict."""

from dataclasses import replace

import numpy as np
import pytest

from bench import report, results, spec, verdict
from bench.children import Outcome
from bench.intervals import Interval, bootstrap, paired_overheads
from bench.memory import flat
from tests.bench.made import outcome

ASKED = spec.Spec(100, 3, 1, "cpu", 24, (), False, "/x")


def test_an_interval_holds_the_median_and_is_the_same_for_the_same_samples():
    found = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median == 3.0
    assert 1.0 <= found.low <= 3.0 <= found.high <= 100.0
    assert found == bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert bootstrap([5.0]) == Interval(5.0, 5.0, 5.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


def test_an_interval_covers_the_true_median_about_nine_times_in_ten():
    rng = np.random.default_rng(1)
    held = sum(bootstrap(list(rng.normal(0.0, 1.0, 24)), seed).holds_zero for seed in range(200))
    assert 165 <= held <= 198


def test_an_overhead_is_what_a_save_window_took_beyond_the_controls_around_it():
    # The machine slows down steadily; the second save window went on for two more steps.
    assert paired_overheads([4.0, 6.0, 8.0], [(7.0, 4), (13.0, 6)], 4) == [2.0, 2.5]
    with pytest.raises(ValueError, match="need 2 controls"):
        paired_overheads([1.0], [(1.0, 1)], 1)


LIMITS = {"memcpy_s": 0.1, "write_s": 0.25, "read_s": 0.5, "state_bytes": 20, "direct": True}


def summary(failing=None, asked=ASKED, **outcomes):
    return results.summarize(asked, LIMITS | {"step_s": 0.1, "window": 4}, outcomes, failing)


def test_a_run_in_which_saving_nothing_costs_something_is_discarded():
    assert summary(null=outcome([-1.0, 0.5, 1.0]))["valid"]
    found = summary(null=outcome([1.0, 1.1, 1.2]))
    assert not found["valid"]
    assert "discard this run" in found["problems"][0]


def test_a_run_in_which_something_else_comes_back_is_not_valid():
    found = summary(null=outcome([0.0]), engine=outcome([1.0], different=["model.w"]))
    assert found["problems"] == ["engine: what came back is not what was saved"]


def test_figures_are_compared_with_the_reference_the_limits_and_saving_nothing():
    found = summary(null=outcome([0.0]), dcp_save=outcome([4.0]), engine=outcome([1.0], memory=34))
    figures = found["engines"]["engine"]
    assert figures["memory_bytes"] == 24
    assert figures["first_stall_s"] == pytest.approx(0.3)
    assert figures["ratios"]["to_reference"]["overhead_s"] == 0.25
    assert figures["ratios"]["to_limit"]["durable_s"] == 2.0
    assert figures["ratios"]["to_limit"]["memory_bytes"] == pytest.approx(1.2)

    assert figures["ratios"]["to_limit"]["overhead_s"] is None
    floor = outcome([0.25])
    found = summary(null=outcome(), floor=floor, engine=outcome([1.0]))
    assert found["engines"]["engine"]["ratios"]["to_limit"]["overhead_s"] == 4.0


def test_a_run_whose_noise_hides_what_is_to_be_compared_is_not_conclusive():
    noisy = outcome([-0.09, 0.0, 0.09])
    assert summary(null=noisy, dcp_save=outcome([5.0]))["valid"]
    found = summary(null=noisy, dcp_save=outcome([4.0]))
    assert not found["valid"]
    assert "not conclusive for overhead: more pairs or a quieter machine" in found["problems"][0]
    assert "+-80.0 ms" in found["problems"][0]
    assert summary(null=noisy, dcp_save=outcome([4.0]), asked=replace(ASKED, quick=True))["valid"]


def test_what_was_measured_twice_counts_as_one():
    null = results.joined(outcome([0.0, 1.0]), outcome([3.0]))
    assert null.figures["costs"]["overhead_s"] == [0.0, 1.0, 3.0]
    assert null.figures["costs"]["interval"]["median"] == 1.0
    assert results.joined(outcome(), Outcome("failed", "why")).reason == "why"
    names = ("memcpy_s", "write_s", "read_s", "read_beside_s", "step_s")
    limits = [{"window": 4} | dict.fromkeys(names, values) for values in ([1.0, 9.0], [2.0])]
    pooled = results.pooled(limits)
    assert (pooled["write_s"], pooled["window"]) == (2.0, 4)
    assert pooled["samples"]["write_s"] == [[1.0, 9.0], [2.0]]


@pytest.mark.parametrize(
    "memory, answer",
    [
        ([0, 0, 900, 903, 100], True),
        ([0, 0, 900, 904], False),
        ([900, 900, 0, 4, 4], False),
        ([1, 2, 3], None),
    ],
)
def test_memory_is_flat_if_it_stays_at_the_third_saves_but_for_3_percent_of_the_state(memory, answer):
    assert flat(memory, 100) is answer


def test_memory_is_also_reported_while_every_save_fails():
    failing = Outcome("ok", "", {}, [15, 15, 15, 16])
    found = summary(null=outcome(), engine=outcome(), failing=failing)
    assert found["engines"]["engine"]["memory_failing_bytes"] == 1
    assert found["engines"]["engine"]["memory_failing_flat"] is False
    assert "memory while every save fails: 0 MB, not flat" in report.table(found)
    found = summary(null=outcome(), engine=outcome(), failing=Outcome("failed", "it did not fail"))
    assert found["problems"] == ["engine with every save failing: it did not fail"]


def test_write_back_that_no_figure_holds_is_told():
    found = summary(null=outcome(), engine=outcome(writeback_s=0.8))
    assert "write-back after each save, in no figure: 800.0 ms" in report.table(found)


def judged(asked=ASKED, cpus=2, peers=None, **own):
    """name and what is asked -> measured and met."""
    outcomes = {
        "null": outcome(memory=0),
        "dcp_save": outcome([3.0], stall_s=3.0, join_s=0.0, durable_s=3.0, restore=2.0),
        "engine": outcome(own.pop("overheads", [0.1]), **own),
    }
    found = summary(asked=asked, **outcomes | (peers or {}))["engines"]
    targets = verdict.judge(found, LIMITS, asked, cpus)
    return {(target.name, target.asked): (target.measured, target.met) for target in targets}


def test_the_verdict_holds_each_target_against_what_was_measured():
    found = judged(stall_s=0.001, join_s=0.001, durable_s=0.25, restore=0.6, memory=15)
    assert found["stall + join", "1/1000 of dcp.save's stall"] == ("1/1500 of dcp.save's stall", True)
    assert found["stall + join", "the best peer's + 1.0 ms"] == ("2.0 ms, t 3.00 s", True)
    assert found["first save", "10.0 ms"] == ("300.0 ms", False)
    assert found["overhead", "1/15 of dcp.save's"] == ("1/30 of dcp.save's", True)
    assert found["overhead", "below every peer's"] == ("100.0 ms, t 3.00 s", True)
    assert found["durable", "1.15 x the raw write"] == ("1 x the raw write", True)
    assert found["durable", "below dcp.save's"] == ("0.0833 x dcp.save's", True)
    assert found["verified restore", "1.3 x the raw read"] == ("1.2 x the raw read", True)
    assert found["verified restore", "0.6 x dcp.load"] == ("0.3 x dcp.load", True)
    assert found["verified restore", "below every peer's"] == ("600.0 ms, t 2.00 s", True)
    assert found["memory", "1.2 x the state"] == ("0.75 x the state", True)
    assert found["memory over the saves", "flat from the third on"] == ("not measured", None)


def test_a_missed_target_is_called_missed_and_decides_nothing():
    found = judged(overheads=[3.1], stall_s=3.1, durable_s=3.0, restore=2.0, memory=30)
    assert {met for measured, met in found.values() if measured != "not measured"} == {False}
    shown = summary(null=outcome(), dcp_save=outcome([3.0]), engine=outcome([2.9]))
    assert shown["valid"]
    line = next(row for row in report.table(shown).splitlines() if row.startswith("overhead  "))
    assert line.split("  ")[0] == "overhead"
    assert "1/1.034 of dcp.save's" in line
    assert "asked: 1/15 of dcp.save's" in line
    assert line.endswith("missed")


def test_less_is_asked_of_a_machine_whose_processors_all_train():
    found = judged(asked=replace(ASKED, threads=2), overheads=[0.7])
    assert found["overhead", "1/4 of dcp.save's"] == ("1/4.286 of dcp.save's", True)
    assert ("durable", "1.3 x the raw write") in found
    assert ("durable", "below dcp.save's") not in found
    assert ("overhead", "1/15 of dcp.save's") in judged(asked=replace(ASKED, threads=2), cpus=3)


def test_what_was_not_measured_is_neither_met_nor_missed():
    absent = Outcome("absent", "not installed")
    found = judged(peers={"dcp_save": absent}, restore=0.6)
    assert found["overhead", "1/15 of dcp.save's"] == ("not measured", None)
    assert found["overhead", "below every peer's"] == ("not measured", None)
    assert found["verified restore", "1.3 x the raw read"] == ("1.2 x the raw read", True)
    assert judged(peers={"engine": absent}) == {}


def test_many_tensors_have_targets_of_their_own():
    found = judged(asked=replace(ASKED, tensors=10_000), stall_s=0.005, join_s=0.004, gil_s=0.2)
    assert found["stall + join, many tensors", "10.0 ms"] == ("9.0 ms", True)
    assert found["interpreter lock held, many tensors", "150.0 ms"] == ("200.0 ms", False)
    assert not any("many" in name for name, _ in judged())
