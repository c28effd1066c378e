"""MLflow: one run whatever happens, params that can't break it, and checkpoints as models exactly once."""

import math
import shutil
from types import SimpleNamespace

import pytest

from ckpt.run import open_run
from flows import registry, tracking

CONFIG = {"tracking": {"experiment": "p"}, "optim": {"lr": 0.1}}


@pytest.fixture
def place(tmp_path, mlflow_database):
    (tmp_path / "a b").mkdir()
    shutil.copy(mlflow_database, tmp_path / "a b" / "mlflow.db")
    run = open_run(str(tmp_path / "runs" / "ü [x]"), info={"project": "p"})
    settings = {"uri": f"sqlite:///{tmp_path}/a b/mlflow.db", "experiment": "p", "tags": {"team": "a"}}
    return SimpleNamespace(run=run, settings=settings, tmp=tmp_path)


def opened(place, config=CONFIG, launch=1):
    return tracking.open_run(place.run, place.settings, config, launch)


def checkpoint(step, metrics=None):
    return SimpleNamespace(
        uri=f"/r/step-{step}",
        attempt=f"step-{step:09d}-00001-aaaa",
        step=step,
        launch=1,
        metrics=metrics or {},
        manifest=SimpleNamespace(costs={"stall_s": 0.0012345678, "persist_s": 2.5, "bytes": 1234}),
    )


def test_l3_params_that_are_long_odd_or_changed_never_stop_a_resume(place):
    config = {
        "long": "x" * 20_000,
        "a:b c": None,
        "nested": [[1, 2], {"k": None}],
        "many": {f"key{i}": i for i in range(300)},
    }
    first = opened(place, config)
    again = opened(place, {**config, "nested": 7}, launch=2)
    third = opened(place, {**config, "nested": 7}, launch=3)
    assert first.run_id == again.run_id == third.run_id
    data = first.client.get_run(first.run_id).data
    assert len(data.params) == 303
    assert len(data.params["long"]) <= 500
    assert data.params["a_b c"] == "null"
    assert data.tags["changed.nested"] == "7"
    assert data.tags["team"] == "a"
    pages = [a.path for a in first.client.list_artifacts(first.run_id, "config")]
    assert pages == [f"config/launch-{n:05d}.json" for n in (1, 2, 3)]


def test_l5_a_resumed_run_is_running_again_and_ends_as_it_ends(place):
    tracked = opened(place)
    tracking.end(tracked, "KILLED")
    assert tracked.client.get_run(tracked.run_id).info.status == "KILLED"
    again = opened(place, launch=2)
    assert again.client.get_run(again.run_id).info.status == "RUNNING"
    tracking.end(again, "FINISHED")
    info = again.client.get_run(again.run_id).info
    assert info.status == "FINISHED"
    assert info.end_time


def test_a_run_whose_file_was_not_written_in_time_finds_its_mlflow_run_again(place):
    tracked = opened(place)
    place.run.store.delete(tracking.TRACKING)
    assert opened(place, launch=2).run_id == tracked.run_id


def test_a_password_in_the_address_is_not_written_to_the_run(place):
    place.settings["uri"] += "?password=x://me:hunter2@y"
    tracked = opened(place)
    page = place.run.store.read(tracking.TRACKING)
    assert b"hunter2" not in page
    assert opened(place, launch=2).run_id == tracked.run_id


def test_a_checkpoint_is_registered_once_however_often_it_is_tried(place):
    tracked = opened(place)
    made = registry.register(tracked, "gpt", checkpoint(10, {"val_loss": 1.5, "nan": math.nan}), place.run.id)
    assert registry.register(tracked, "gpt", checkpoint(10), place.run.id) == made
    registry.register(tracked, "gpt", checkpoint(20), place.run.id)
    assert registry.registered_attempts(tracked, "gpt", place.run.id) == {
        checkpoint(10).attempt,
        checkpoint(20).attempt,
    }
    assert registry.registered_attempts(tracked, "gpt", "another") == set()
    models = tracked.client.search_logged_models([tracked.experiment_id])
    assert sorted(m.tags["ckpt.step"] for m in models) == ["10", "20"]
    assert {m.status for m in models} == {"READY"}
    for tags in (models[0].tags, tracked.client.search_model_versions("name = 'gpt'")[0].tags):
        costs = {name: value for name, value in tags.items() if name.startswith("ckpt.cost.")}
        assert costs == {
            "ckpt.cost.stall_s": "0.00123457",
            "ckpt.cost.persist_s": "2.5",
            "ckpt.cost.bytes": "1234",
        }


def test_a_registration_cut_off_in_the_middle_is_finished_later(place, monkeypatch):
    tracked = opened(place)
    real = registry.write_pointer
    monkeypatch.setattr(registry, "write_pointer", lambda *_: (_ for _ in ()).throw(OSError("cut")))
    with pytest.raises(OSError):
        registry.register(tracked, "gpt", checkpoint(10), place.run.id)
    monkeypatch.setattr(registry, "write_pointer", real)
    registry.register(tracked, "gpt", checkpoint(10), place.run.id)
    (model,) = tracked.client.search_logged_models([tracked.experiment_id])
    assert model.status == "READY"


def test_the_champion_moves_only_to_a_better_finite_score(place):
    tracked = opened(place)
    versions = [registry.register(tracked, "gpt", checkpoint(s), place.run.id).version for s in (1, 2, 3, 4)]

    def crown(place_of, score):
        return registry.crown(tracked.client, "gpt", versions[place_of], score).moved

    assert not crown(0, math.nan)
    assert registry.by_alias(tracked.client, "gpt", "champion") is None
    assert crown(0, 2.0)
    assert not crown(1, 2.0)
    assert not crown(2, -math.inf)
    assert not crown(2, 3.0)
    assert crown(3, 1.5)
    assert str(registry.by_alias(tracked.client, "gpt", "champion").version) == versions[3]
