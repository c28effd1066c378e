"""Evaluating and predicting from committed checkpoints, by nothing but the model's bytes."""

import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import torch

import ckpt
from tests.training.harness import config, train_here
from tests.training.waiting import until
from training.launch import EvaluateSpec, environment, evaluate
from training.predict import load


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    trace = train_here(run, config({"trainer.max_steps": 10, "trainer.eval_every": 5}))
    return run, trace


def spec(checkpoint, **more):
    return EvaluateSpec(config(), checkpoint, 16, **more)


def test_evaluation_of_a_checkpoint_gives_the_loss_that_training_saw_and_writes_nothing(trained):
    run, trace = trained
    newest = ckpt.latest_valid(str(run))
    before = contents(run)
    result = evaluate(spec(newest.uri, timeout_s=120))
    seen = {event["step"]: event["val_loss"] for event in trace.of("eval")}
    assert result == {"val_loss": seen[10], "samples": 16, "step": 10}
    assert contents(run) == before


def test_a_damaged_checkpoint_is_not_evaluated(trained, tmp_path):
    run, _ = trained
    subprocess.run(["cp", "-r", run, tmp_path / "copy"], check=True)
    newest = ckpt.latest_valid(str(tmp_path / "copy"))
    shard = next((tmp_path / "copy" / newest.attempt).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    for place in range(4096, len(data), 16):
        data[place] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"(?s)failed \(exit code 1\).*Corrupt"):
        evaluate(spec(newest.uri, timeout_s=120))


def test_an_evaluation_ends_with_the_process_that_asked_for_it(trained):
    run, _ = trained
    child = subprocess.Popen(
        [sys.executable, "-m", "training.evaluate"],
        env=environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    slow = config({"model.eval_at": {"1": 600}})
    job = {"config": slow, "checkpoint": ckpt.latest_valid(str(run)).uri, "samples": 16}
    child.stdin.write(json.dumps(job).encode() + b"\n")
    child.stdin.close()
    try:
        assert child.wait(60) == 1
    finally:
        child.kill()


def test_an_evaluation_that_takes_too_long_is_ended(trained):
    run, _ = trained
    slow = EvaluateSpec(
        config({"model.eval_at": {"1": 600}}), ckpt.latest_valid(str(run)).uri, 16, timeout_s=1.0
    )
    with pytest.raises(TimeoutError, match=r"longer than 1.0 s"):
        evaluate(slow)


def test_a_model_of_another_shape_is_refused_with_the_names(trained):
    run, _ = trained
    from training.weights import load_model

    with pytest.raises(ckpt.StateError, match=r"first.weight"):
        load_model(ckpt.latest_valid(str(run)).uri, config({"model.hidden": 9}))


def test_a_gpt_predicts_text_and_the_loss_of_its_prompt(tmp_path):
    model = {"_target_": "training.models.gpt.GPT", "context": 16, "layers": 1, "heads": 2, "width": 16}
    data = {"_target_": "training.data.stdlib.StdlibText", "context": 16, "max_bytes": 2_000_000}
    train_here(tmp_path, config({"model": model, "data": data, "trainer.max_steps": 4}))
    one, two = load(ckpt.latest_valid(str(tmp_path)).uri).predict(["import os", "x"])
    assert len(one["text"]) > 0
    assert 4.0 < one["loss"] < 7.0
    assert two["loss"] is None


def test_an_mlp_predicts_classes(tmp_path):
    model = {"_target_": "training.models.mlp.MLP", "hidden": 32}
    data = {"_target_": "training.data.digits.Digits"}
    changes = {"model": model, "data": data, "trainer.max_steps": 120, "trainer.batch_size": 32}
    train_here(tmp_path, config({**changes, "schedule": {"_target_": "training.schedules.constant"}}))
    from training.data.digits import Digits

    val = Digits().val
    rows = [val.sample(i, 0, 0) for i in range(len(val))]
    got = load(ckpt.latest_valid(str(tmp_path)).uri).predict([row["inputs"].tolist() for row in rows])
    right = sum(a == int(row["targets"]) for a, row in zip(got, rows, strict=True))
    assert right > 0.8 * len(rows)
    assert all(isinstance(item, int) for item in got)


def test_the_tied_output_of_a_gpt_is_loaded_with_its_embedding(tmp_path):
    model = {"_target_": "training.models.gpt.GPT", "context": 16, "layers": 1, "heads": 2, "width": 16}
    data = {"_target_": "training.data.stdlib.StdlibText", "context": 16, "max_bytes": 2_000_000}
    train_here(tmp_path, config({"model": model, "data": data, "trainer.max_steps": 2}))
    loaded = load(ckpt.latest_valid(str(tmp_path)).uri).model
    assert loaded.head.weight is loaded.embed.weight
    assert torch.isfinite(loaded.embed.weight).all()


def test_metrics_of_a_run_reach_the_spool_once_though_it_was_stopped(tmp_path):
    tracking = {"tracking": {"uri": "http://127.0.0.1:9", "spool": str(tmp_path / "spool")}}
    settings = config({**tracking, "trainer.max_steps": 12, "trainer.eval_every": 4})
    train_here(tmp_path / "run", settings, stop_at=6, how=signal.SIGTERM)
    trace = train_here(tmp_path / "run", settings, which="step:5")

    def values(key):
        with closing(sqlite3.connect(tmp_path / "spool" / "metrics.sqlite", timeout=10)) as table:
            rows = table.execute(
                "SELECT step, value FROM line WHERE key = ? ORDER BY step", (key,)
            ).fetchall()
        return {step: float(value) for step, value in rows}

    until(lambda: list(values("loss")) == list(range(1, 13)), 20, "one loss for each step")
    # What each committed save cost goes the same way.
    names = ("stall_ms", "join_ms", "stage_s", "persist_s", "durable_s", "bytes", "overhead_percent")
    until(lambda: list(values("checkpoint/slowed_percent")) == [5, 6, 10, 12], 20, "the last cost of each")
    assert all(list(values(f"checkpoint/{key}")) == [5, 6, 10, 12] for key in names)
    assert 0 < values("checkpoint/persist_s")[10] < values("checkpoint/durable_s")[10] < 60
    stats = trace.end["stats"]
    assert values("checkpoint/overhead_percent")[12] == pytest.approx(stats["overhead_percent"])
    assert stats["stall_s"] <= stats["lost_s"] < stats["trained_s"]
    from tests.training.test_metrics import end_sender

    end_sender(tmp_path / "spool")
