"""A stop is honoured wherever it comes, and the run goes on from there as if nothing had been."""

import json
import os
import signal
import threading
import time

import pytest

import ckpt
from ckpt.launches import list_launches
from ckpt.run import open_run
from tests.training.harness import Trace, config, train_here
from tests.training.waiting import until


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("gold"), config({"trainer.eval_every": 4}))


def settings(**changes):
    return config({"trainer.eval_every": 4, **changes})


def stopped_at(run):
    """The step that the last launch stopped at; it must be committed and recorded."""
    end = list_launches(open_run(str(run)).store)[-1].end
    assert end["outcome"] == "preempted"
    assert ckpt.latest_valid(str(run)).step == end["last_step"]
    return end["last_step"]


def assert_goes_on_exactly(run, trace, gold):
    train_here(run, settings(), trace=trace)
    assert trace.steps == gold.steps
    assert [(e["step"], e["val_loss"]) for e in trace.of("eval")] == [
        (e["step"], e["val_loss"]) for e in gold.of("eval")
    ]
    assert trace.end["weights_digest"] == gold.end["weights_digest"]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_o1_a_signal_in_the_middle_of_a_step_lets_it_finish(tmp_path, gold, number):
    trace = train_here(tmp_path, settings(**{"model.at": {"7": number}}))
    assert stopped_at(tmp_path) == 7
    assert_goes_on_exactly(tmp_path, trace, gold)


def test_o1_a_signal_in_the_first_step_of_all(tmp_path, gold):
    trace = train_here(tmp_path, settings(**{"model.at": {"1": "SIGTERM"}}))
    assert stopped_at(tmp_path) == 1
    assert_goes_on_exactly(tmp_path, trace, gold)


def test_o1_a_signal_in_evaluation_ends_it_and_the_next_launch_does_it_again(tmp_path, gold):
    trace = train_here(tmp_path, settings(**{"model.eval_at": {"6": "SIGTERM"}}))
    assert stopped_at(tmp_path) == 8
    assert [event["step"] for event in trace.of("eval")] == [4]
    assert_goes_on_exactly(tmp_path, trace, gold)


@pytest.mark.parametrize("workers", [0, 2])
def test_o1_a_signal_while_waiting_for_data_does_not_wait_for_it(tmp_path, gold, workers):
    seen = []
    train_here(tmp_path / "order", config({"model.trace": str(tmp_path / "ids"), "trainer.max_steps": 8}))
    seen = (tmp_path / "ids").read_text().split("\n")
    hanging = seen[7].split()[0]  # the first sample of the 8th update takes five minutes
    trace = Trace()
    signals = threading.Thread(target=signal_after, args=(trace, 7))
    signals.start()
    before = time.monotonic()
    train_here(
        tmp_path / "run",
        settings(**{"data.sleep": {hanging: 300.0}, "trainer.workers": workers}),
        trace=trace,
    )
    signals.join()
    assert time.monotonic() - before < 30
    assert stopped_at(tmp_path / "run") == 7
    assert_goes_on_exactly(tmp_path / "run", trace, gold)


def signal_after(trace, step):
    until(lambda: any(event["step"] == step for event in trace.of("step")), 30, f"step {step}")
    time.sleep(0.2)  # the main thread is in its next wait by now, or the flag waits for it there
    os.kill(os.getpid(), signal.SIGTERM)


def test_o1_a_signal_while_a_save_is_being_written(tmp_path, gold, monkeypatch):
    rule = {"match": "writer:pwrite:.*step-000000005.*", "nth": 1, "do": "delay", "seconds": 1.0}
    monkeypatch.setenv("CKPT_FAULTS", json.dumps([rule]))
    trace = train_here(tmp_path, settings(), stop_at=5)
    assert stopped_at(tmp_path) == 5
    steps = [c.step for c in ckpt.checkpoints(str(tmp_path))]
    assert steps == [5]  # the save of that very step was in flight: it is not made twice
    monkeypatch.delenv("CKPT_FAULTS")
    assert_goes_on_exactly(tmp_path, trace, gold)


def test_f9_a_finished_run_commits_its_last_step_once(tmp_path):
    train_here(tmp_path / "a", config({"trainer.max_steps": 32}))
    train_here(tmp_path / "b", config({"trainer.max_steps": 30}))
    assert [c.step for c in ckpt.checkpoints(str(tmp_path / "a"))] == [32, 30, 25, 20, 15, 10, 5]
    assert [c.step for c in ckpt.checkpoints(str(tmp_path / "b"))] == [30, 25, 20, 15, 10, 5]


def test_a_finished_run_that_is_started_again_trains_and_saves_nothing(tmp_path):
    train_here(tmp_path, config({"trainer.max_steps": 8}))
    before = [c.uri for c in ckpt.checkpoints(str(tmp_path))]
    again = train_here(tmp_path, config({"trainer.max_steps": 8}))
    assert again.steps == []
    assert again.end["outcome"] == "finished"
    assert [c.uri for c in ckpt.checkpoints(str(tmp_path))] == before


def test_a_stop_before_the_first_step_makes_no_checkpoint(tmp_path):
    trace = Trace()

    class Stopping(list):
        def append(self, event):
            super().append(event)
            if event["event"] == "start":
                signal.raise_signal(signal.SIGTERM)

    trace.events = Stopping()
    train_here(tmp_path, config(), trace=trace)
    assert trace.end["outcome"] == "preempted"
    assert trace.steps == []
    assert ckpt.checkpoints(str(tmp_path)) == []


def test_n3_new_steps_and_rates_act_on_resume_and_are_named(tmp_path):
    train_here(tmp_path, config({"trainer.max_steps": 8}))
    changes = {
        "trainer.max_steps": 12,
        "optim.lr": 0.001,
        "schedule": {"_target_": "training.schedules.constant"},
    }
    resumed = train_here(tmp_path, config(changes))
    assert [(step, lr) for step, _, lr, _ in resumed.steps] == [(step, 0.001) for step in range(9, 13)]
    assert "optim.lr was 0.01 and is 0.001 now" in resumed.notes


def test_f7_another_batch_size_goes_on_with_the_next_sample(tmp_path):
    trace = tmp_path / "ids"
    train_here(tmp_path / "gold", config({"model.trace": str(tmp_path / "gold_ids")}))
    train_here(tmp_path / "run", config({"model.trace": str(trace), "trainer.max_steps": 5}))
    train_here(
        tmp_path / "run",
        config({"model.trace": str(trace), "trainer.max_steps": 9, "trainer.batch_size": 8}),
    )
    assert trace.read_text().split() == (tmp_path / "gold_ids").read_text().split()[: 5 * 4 + 4 * 8]


def test_other_data_is_named_on_resume(tmp_path):
    train_here(tmp_path, config({"trainer.max_steps": 4}))
    resumed = train_here(tmp_path, config({"trainer.max_steps": 6, "data.size": 48}))
    assert "the data is not what this run was trained on: size was 64, is 48" in resumed.notes


def test_g3_leaving_mixed_precision_is_told_and_goes_on(tmp_path):
    train_here(tmp_path, config({"trainer.max_steps": 4, "trainer.precision": "fp16"}))
    resumed = train_here(tmp_path, config({"trainer.max_steps": 6}))
    assert "precision was fp16 and is fp32 now" in resumed.notes
    assert [step for step, *_ in resumed.steps] == [5, 6]


def test_a_checkpoint_gone_back_to_is_gone_on_from_as_the_run_once_did(tmp_path, gold):
    train_here(tmp_path, settings(), stop_at=14)
    back = train_here(tmp_path, settings(), which="step:10")
    assert back.steps == gold.steps[10:]
    assert back.end["weights_digest"] == gold.end["weights_digest"]
