"""A trainer that is killed again and again ends with the weights of one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import ckpt
from tests.training import harness
from tests.training.waiting import until
from training import procs
from training.launch import LaunchSpec, TrainerProcess

STEPS = 48
PHASES = ("start-up", "opening", "staging", "writing", "commit")
SETTINGS = {
    "trainer.max_steps": STEPS,
    "schedule.max_steps": STEPS,
    "checkpoint.save.every": 2,
    "checkpoint.keep": {"_target_": "ckpt.KeepLast", "n": 3},
    "model.at": {str(n): 0.04 for n in range(STEPS + 1)},
}


def faults(phase: str, rng: random.Random) -> list[dict[str, object]]:
    """Rules which make the phase last, or which kill in it."""
    if phase == "opening":
        return [
            {
                "match": r"trainer:(list|read|create|size|mkdir|read_into):",
                "nth": rng.randint(1, 8),
                "do": "kill",
            }
        ]
    if phase == "staging":
        return [
            {"match": f"trainer:stage:{rng.choice(['begin', 'end'])}", "nth": rng.randint(1, 2), "do": "kill"}
        ]
    if phase == "writing":
        return [{"match": r"writer:(pwrite|ftruncate|fsync):.*\.safetensors", "do": "delay", "seconds": 0.3}]
    if phase == "commit":
        return [{"match": r"writer:create:.*manifest\.json", "do": "delay", "seconds": 0.6}]
    return []


def has_shard_only(attempt: Path) -> bool:
    return (attempt / "rank-00000.safetensors").exists() and not (attempt / "rank-00000.json").exists()


def awaits_commit(attempt: Path) -> bool:
    return (attempt / "rank-00000.json").exists() and not (attempt / "manifest.json").exists()


def rank_of(trainer: TrainerProcess) -> int:
    """The process that trains, a child of torchrun's agent; 0 if there is none yet."""
    rows = [procs.read(pid) for pid in trainer.pids()]
    agents = {row.pid for row in rows if row and row.parent == os.getpid()}
    return next((row.pid for row in rows if row and row.parent in agents), 0)


def shoot(trainer: TrainerProcess) -> None:
    pid = until(lambda: rank_of(trainer), 60, "a rank to kill")
    os.kill(pid, signal.SIGKILL)


def kill_in(phase: str, run: Path, rng: random.Random) -> int | None:
    """Launch, kill the trainer in `phase`, and return the last step that it told of."""
    known = set(run.glob("step-*"))
    rules = faults(phase, rng)
    spec = LaunchSpec(
        harness.config(SETTINGS), [], str(run), log_dir=run / "logs", env={"CKPT_FAULTS": json.dumps(rules)}
    )
    trainer = TrainerProcess.start(spec)
    try:
        if phase == "start-up":
            until(lambda: rank_of(trainer), 60, "a rank")
            time.sleep(rng.uniform(0.0, 0.5))  # how far it came is the seed's choice
            shoot(trainer)
        elif phase in ("writing", "commit"):
            seen = has_shard_only if phase == "writing" else awaits_commit
            until(lambda: any(seen(a) for a in set(run.glob("step-*")) - known), 90, phase)
            shoot(trainer)
        outcome = trainer.wait(90)
    finally:
        trainer.kill()
        trainer.wait(30)
    assert outcome.state == "failed", outcome
    assert not trainer.pids()
    return outcome.last_step


def train_to_the_end(run: Path) -> dict[str, object]:
    spec = LaunchSpec(harness.config(SETTINGS), [], str(run), log_dir=run / "logs")
    trainer = TrainerProcess.start(spec)
    try:
        events = list(trainer.events(120))
        outcome = trainer.wait(30)
    finally:
        trainer.kill()
    assert outcome.state == "finished", outcome
    return next(e for e in reversed(events) if e["event"] == "end")


def weights_of_the_uninterrupted_run(folder: Path) -> str:
    settings = harness.config(SETTINGS)
    return str(harness.train_here(folder, settings).end["weights_digest"])


def kill_and_resume(tmp_path: Path, phases: list[str], seed: int) -> None:
    rng = random.Random(seed)
    run = tmp_path / "killed"
    ckpt.open_run(run)
    for number, phase in enumerate(phases, 1):
        last = kill_in(phase, run, rng)
        newest = ckpt.latest_valid(run)
        print(f"kill {number} in {phase}: last step {last}, newest valid {newest.step if newest else None}")
        for checkpoint in ckpt.checkpoints(run):
            assert ckpt.verify(checkpoint).ok
    end = train_to_the_end(run)
    assert end["step"] == STEPS
    assert end["weights_digest"] == weights_of_the_uninterrupted_run(tmp_path / "whole")


@pytest.mark.timeout(300)
def test_a_trainer_killed_in_staging_writing_and_commit_ends_with_the_uninterrupted_weights(tmp_path: Path):
    kill_and_resume(tmp_path, ["staging", "writing", "commit"], seed=1)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2])
def test_a_trainer_killed_twenty_times_ends_with_the_uninterrupted_weights(tmp_path: Path, seed: int):
    phases = [*PHASES] * 3 + random.Random(seed).choices(PHASES, k=5)
    random.Random(seed + 1).shuffle(phases)
    kill_and_resume(tmp_path, phases, seed)
