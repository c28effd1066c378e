"""A run that was stopped, wherever and however often, is the run that was not stopped, to the bit."""

import pytest

from tests.training.harness import Trace, config, ids, train_here

MODES = {
    "plain": {},
    "workers": {"trainer.workers": 2, "data.draws": "global"},
    "accumulate": {"trainer.accumulate": 2, "trainer.clip_norm": 0.05},
    "no_clipping": {"trainer.clip_norm": None},
    "bf16": {"trainer.precision": "bf16"},
    "fp16": {"trainer.precision": "fp16"},
    "evaluation": {"trainer.eval_every": 3},
}


class Run:
    """A toy run in a folder of its own."""

    def __init__(self, folder, changes):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.settings = config({"model.trace": str(folder / "ids"), **changes})
        self.trace = Trace()

    def train(self, stop_at=None, **changes):
        for key, value in changes.items():
            self.settings["trainer"][key] = value
        train_here(self.folder / "run", self.settings, stop_at, trace=self.trace)
        return self

    @property
    def result(self):
        return self.trace.steps, ids(self.folder / "ids"), self.trace.end["weights_digest"]


@pytest.fixture(scope="session")
def gold(tmp_path_factory):
    made = {}

    def result(mode, changes=None):
        if mode not in made:
            run = Run(tmp_path_factory.mktemp("gold"), MODES[mode] if changes is None else changes)
            made[mode] = run.train().result
        return made[mode]

    return result


def test_gold_itself_is_repeatable_and_learns(tmp_path, gold):
    steps, seen, _ = gold("plain")
    assert Run(tmp_path, {}).train().result == gold("plain")
    assert [step for step, *_ in steps] == list(range(1, 33))
    assert sorted(seen) == sorted([*range(64)] * 2)


@pytest.mark.parametrize("stop_at", [1, 5, 16, 20, 31])
def test_f1_f3_a_stop_changes_nothing(tmp_path, gold, stop_at):
    assert Run(tmp_path, {}).train(stop_at).train().result == gold("plain")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_f3_g1_g3_stops_in_every_mode_change_nothing(tmp_path, gold, mode):
    run = Run(tmp_path, MODES[mode])
    for stop_at in (1, 7, 20):
        run.train(stop_at)
    assert run.train().result == gold(mode)


def test_f5_stops_at_the_ends_of_epochs_count_no_step_twice(tmp_path, gold):
    run = Run(tmp_path, {"trainer.max_steps": 48})
    for stop_at in (16, 32, 47):
        run.train(stop_at)
    assert run.train().result == gold("three epochs", {"trainer.max_steps": 48})
    assert [step for step, *_ in run.trace.steps] == list(range(1, 49))


def test_stopping_after_every_single_step_changes_nothing(tmp_path, gold):
    run = Run(tmp_path, {})
    for stop_at in range(1, 32):
        run.train(stop_at)
    assert run.train().result == gold("plain")


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop_at", range(1, 32))
def test_f1_f3_a_stop_at_any_step_changes_nothing_in_any_mode(tmp_path, gold, mode, stop_at):
    assert Run(tmp_path, MODES[mode]).train(stop_at).train().result == gold(mode)


SCHEDULES = {
    "multistep": {"_target_": "training.schedules.multistep", "milestones": [6, 11], "gamma": 0.5},
    "cosine": {"_target_": "training.schedules.warmup_cosine", "max_steps": 32, "warmup": 0, "floor": 0.0},
    "warmup": {"_target_": "training.schedules.warmup_cosine", "max_steps": 32, "warmup": 8, "floor": 0.1},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_g1_learning_rates_go_on_where_they_were(tmp_path, gold, name):
    changes = {"schedule": SCHEDULES[name]}
    run = Run(tmp_path, changes)
    for stop_at in (5, 6, 10, 11):
        run.train(stop_at)
    assert run.train().result == gold(f"schedule {name}", changes)
