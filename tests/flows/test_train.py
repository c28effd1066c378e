"""Train, resume and evaluate as a person runs them, on real storage, a real Prefect server and a real MLflow
store."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.flows.harness import ENDLESS, SMALL, gone, wait_until

PREDICT = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
print(json.dumps(model.predict(json.loads(sys.argv[3]))))
"""


@pytest.mark.long
def test_i3_odd_storage_paths_and_names_work_from_training_to_pruning(project):
    root = project.home / "a=b, [x] ü ~y"
    where = f"storage.root={root}"
    trained = project.cli("train", *SMALL, "run=2026_12_01", where, "trainer.max_steps=40")
    assert trained.code == 0, trained
    assert re.search(r"first step after \d+\.\d s", trained.out)
    assert re.search(r"cost: stall [\d.]+ ms and join .* in all, [\d.]+ % of .*; a save every ", trained.out)
    assert (root / "2026_12_01" / "run.json").is_file()

    resumed = project.cli("resume", "run=2026_12_01", where)
    assert resumed.code == 0, resumed
    assert "run 2026_12_01 has finished: step 40 of 40" in resumed.out

    evaluated = project.cli("evaluate", "run=2026_12_01", where, "which=step:30")
    assert evaluated.code == 0, evaluated
    assert re.search(r"evaluated: val [\d.]+ at step 30 -> models:/mlp@champion", evaluated.out)

    # Retention kept three; each of the four commits has one version, whose model loads from any folder.
    versions = project.versions("mlp")
    assert sorted(int(v.tags["ckpt.step"]) for v in versions) == [10, 20, 30, 40]
    assert all(float(v.tags["ckpt.cost.persist_s"]) > 0 for v in versions)
    (tracked,) = project.mlflow_runs()
    stalls = project.mlflow().get_metric_history(tracked.info.run_id, "checkpoint/stall_ms")
    assert [metric.step for metric in stalls] == [10, 20, 30, 40]
    predicted = subprocess.run(
        [sys.executable, "-c", PREDICT, project.mlflow_uri, "models:/mlp@champion", json.dumps([[0.0] * 64])],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)[0] in range(10)

    # The champion is pinned: pruning to one leaves two.
    pruned = project.cli("ckpt", "prune", str(root / "2026_12_01"), "--keep-last", "1")
    assert pruned.code == 0, pruned
    listed = project.cli("ckpt", "ls", str(root / "2026_12_01"), "--json")
    assert sorted(c["step"] for c in json.loads(listed.out)["checkpoints"]) == [30, 40], listed
    verified = project.cli("ckpt", "verify", str(root / "2026_12_01"))
    assert verified.code == 0, verified


def test_ctrl_c_saves_and_n3_resume_lists_what_differs_and_refuses_what_is_unsafe(project, started):
    training = started("train", *ENDLESS, "run=lark")
    training.expect(r"saved \d+", timeout=150)
    family = training.family()
    training.ctrl_c()
    assert training.wait(10) == 130, training.out
    assert "Traceback" not in training.out
    assert "python -m flows.resume run=lark" in training.out
    assert gone(family) == []
    stopped_at = int(re.search(r"stopped at step (\d+)", training.out)[1])

    before = sorted(p.relative_to(project.home) for p in project.run_dir("lark").rglob("*"))
    refused = project.cli("resume", "run=lark", "model.hidden=16", "trainer.max_steps=10000000")
    assert refused.code == 2, refused
    assert "model.hidden: 128 -> 16" in refused.err
    assert "force=true" in refused.err
    assert sorted(p.relative_to(project.home) for p in project.run_dir("lark").rglob("*")) == before

    end = stopped_at + 40
    resumed = project.cli(
        "resume", "run=lark", f"trainer.max_steps={end}", "checkpoint.save.every=10", "optim.lr=1e-4"
    )
    assert resumed.code == 0, resumed
    assert f"changed: trainer.max_steps: 1000000 -> {end}" in resumed.out
    assert "changed: checkpoint.save.every: 200 -> 10" in resumed.out
    assert "changed: optim.lr: 0.001 -> 0.0001" in resumed.out
    assert f"resume from step {stopped_at}" in resumed.out
    assert f"finished {end} steps" in resumed.out

    # L5: one MLflow run over all launches, finished in the end.
    (run,) = project.mlflow_runs()
    assert run.info.status == "FINISHED"
    assert run.data.tags["changed.optim.lr"] == "0.0001"
    client = project.mlflow()
    wait_until(
        lambda: max((m.step for m in client.get_metric_history(run.info.run_id, "lr")), default=0) == end
    )


@pytest.mark.long
def test_ctrl_c_twice_leaves_at_once(project, started):
    training = started("train", *ENDLESS, "run=kite")
    training.expect(r"saved \d+", timeout=150)
    family = training.family()
    training.ctrl_c()
    training.expect("saving and stopping")
    training.ctrl_c()
    assert training.wait(10) == 130, training.out
    assert "Traceback" not in training.out
    assert gone(family) == []
    verified = project.cli("ckpt", "verify", str(project.run_dir("kite")))
    assert verified.code == 0, verified


@pytest.mark.long
def test_p1_a_second_trainer_is_refused_by_name_and_l5_signals_end_the_mlflow_run(project, started):
    training = started("train", *ENDLESS, "run=wren")
    training.expect(r"saved \d+", timeout=150)
    for flow, args in (("resume", ()), ("train", ("debug=smoke", "seed=5"))):
        refused = project.cli(flow, "run=wren", *args)
        assert refused.code == 1, refused
        assert re.search(r"being trained by host \S+, pid \d+ at step \d+", refused.err), refused
    (run,) = wait_until(project.mlflow_runs)
    family = training.family()
    training.signal(signal.SIGTERM)
    training.wait(40)
    assert "python -m flows.resume run=wren" in training.out
    assert gone(family) == []
    assert project.mlflow().get_run(run.info.run_id).info.status == "KILLED"

    again = started("resume", "run=wren")
    again.expect(r"first step after", timeout=150)
    wait_until(lambda: project.mlflow().get_run(run.info.run_id).info.status == "RUNNING")
    pid = json.loads(sorted((project.run_dir("wren") / "launches").glob("0*2.json"))[0].read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    assert again.wait(60) == 1, again.out
    assert "SIGKILL" in again.out
    assert project.mlflow().get_run(run.info.run_id).info.status == "FAILED"


@pytest.mark.long
def test_an_existing_run_is_refused_with_the_resume_command_and_a_finished_one_says_so(project):
    assert project.cli("train", *SMALL, "run=finch").code == 0
    done = project.cli("train", *SMALL, "run=finch")
    assert done.code == 0, done
    assert "run finch has finished" in done.out
    shorter = project.cli("train", *SMALL, "run=finch", "trainer.max_steps=10")
    assert "trainer.max_steps=40" in shorter.out, shorter  # twice what is there, not twice what was asked
    refused = project.cli("train", *SMALL, "run=finch", "trainer.max_steps=60")
    assert refused.code == 2, refused
    assert "python -m flows.resume run=finch" in refused.err


@pytest.mark.long
def test_a_sweep_trains_one_run_for_each_value(project):
    swept = project.cli("train", "-m", *SMALL, "optim.lr=1e-3,3e-4", timeout=240)
    assert swept.code == 0, swept
    rates = sorted(r.data.params["optim.lr"] for r in project.mlflow_runs())
    assert rates == ["0.0003", "0.001"]
    assert sorted(p.name for p in project.home.iterdir() if not p.name.startswith("out-")) in (
        ["prefect", "runs"],
        ["runs"],
    )


@pytest.mark.parametrize("typo", ["optim.lrr=1", "+optim.lrr=1"])
def test_a_typo_makes_no_folder(empty_project, typo):
    refused = empty_project.cli("train", *SMALL, typo)
    assert refused.code == 2
    assert refused.err == "unknown key optim.lrr, did you mean 'optim.lr'?\n"
    assert list(empty_project.home.iterdir()) == []


def test_the_composed_config_and_help_can_be_looked_at_without_training(empty_project):
    shown = empty_project.cli("train", "--cfg", "job", "optim.lr=1e-4", "run=1e3")
    assert shown.code == 0, shown
    assert "lr: 0.0001" in shown.out
    assert "run: '1e3'" in shown.out
    assert "python -m flows.resume run=NAME" in empty_project.cli("resume", "--help").out
    assert list(empty_project.home.iterdir()) == []


@pytest.mark.long
def test_damage_to_the_newest_checkpoint_is_named_and_the_one_before_taken(project):
    assert project.cli("train", *SMALL, "run=heron").code == 0
    newest, older = sorted(project.run_dir("heron").glob("step-*"), reverse=True)
    flip(next(newest.glob("*.safetensors")))
    resumed = project.cli("resume", "run=heron")
    assert resumed.code == 0, resumed
    assert newest.name in resumed.out
    assert "resume from step 10 (verified)" in resumed.out
    assert "finished 20 steps" in resumed.out

    for shard in project.run_dir("heron").glob("step-*/*.safetensors"):
        os.truncate(shard, shard.stat().st_size // 2)
    before = sorted(p.name for p in project.run_dir("heron").rglob("*"))
    failed = project.cli("resume", "run=heron")
    assert failed.code == 1, failed
    assert older.name in failed.err + failed.out
    assert sorted(p.name for p in project.run_dir("heron").rglob("*")) == before


def flip(path):
    """Flip one bit in the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
