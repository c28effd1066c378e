"""Score one checkpoint, record the score with its model, and let the better one be champion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ckpt.errors import CheckpointError, NotCommitted
from ckpt.pins import pin, unpin
from ckpt.run import open_run
from flows import leases, registry, tracking
from flows.plan import EvaluatePlan
from training.launch import EvaluateSpec
from training.launch import evaluate as run_evaluation


@task(name="score", cache_policy=NO_CACHE, persist_result=False)
def score(config: dict[str, Any], checkpoint_uri: str, samples: int, env: dict[str, str]) -> dict[str, Any]:
    """Validation loss of a checkpoint, measured in a process of its own that can't write to the run."""
    return run_evaluation(EvaluateSpec(config, checkpoint_uri, samples=samples, env=env))


@task(name="record", cache_policy=NO_CACHE, persist_result=False)
def record(target: EvaluatePlan, val_loss: float) -> registry.Crowned | None:
    """Log the score to the checkpoint's model in MLflow and move `champion` if it is better."""
    plan, checkpoint = target.plan, target.checkpoint
    settings = plan.composed.values["tracking"]
    known = tracking.read(plan.run)
    client = tracking.client(settings["uri"])
    if known is None:
        tracked = tracking.open_run(plan.run, settings, plan.composed.saved, checkpoint.launch)
        tracking.end(tracked, "FINISHED")
    else:
        tracked = tracking.Tracked(client, settings["uri"], known["run_id"], known["experiment_id"])
    made = registry.register(tracked, plan.model_name, checkpoint, plan.run.id)
    if math.isfinite(val_loss):
        client.log_metric(
            tracked.run_id,
            "val_loss",
            val_loss,
            step=checkpoint.step,
            model_id=made.model_id,
            synchronous=True,
        )
    crowned = registry.crown(client, plan.model_name, made.version, val_loss)
    if crowned.moved:
        _pin_champion(target, crowned)
    return crowned


def run(target: EvaluatePlan, say: Callable[[str], None]) -> str:
    """Evaluate; the line that says what came out. Raises RuntimeError if the evaluation itself fails."""
    plan, checkpoint = target.plan, target.checkpoint
    values = plan.composed.values
    if not leases.hold(plan.run, checkpoint, "evaluate"):
        raise NotCommitted(f"{checkpoint.uri} is being pruned: it can't be evaluated any more")
    try:
        env = {k: str(v) for k, v in values["launcher"]["env"].items()}
        result = score(values, checkpoint.uri, values["trainer"]["eval_samples"], env)
        val = float(result["val_loss"])
        line = f"evaluated: val {val:.4g} at step {checkpoint.step}"
        if values["tracking"]["uri"] is not None:
            line = f"{line}{_told(plan.model_name, _recorded(target, val, say))}"
    finally:
        leases.drop(plan.run, checkpoint, "evaluate")
    say(line)
    return line


def _recorded(target: EvaluatePlan, val: float, say: Callable[[str], None]) -> registry.Crowned | None:
    try:
        crowned: registry.Crowned | None = record(target, val)
    except Exception as error:
        say(f"MLflow has not recorded it: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return None
    return crowned


def _told(name: str, crowned: registry.Crowned | None) -> str:
    if crowned is None:
        return ""
    if crowned.moved:
        before = f" (was {crowned.before:.4g})" if crowned.before is not None else ""
        return f" -> models:/{name}@{registry.CHAMPION}{before}"
    if crowned.before is None:
        return f"; not a number that could make it models:/{name}@{registry.CHAMPION}"
    return f"; models:/{name}@{registry.CHAMPION} stays (val {crowned.before:.4g})"


def _pin_champion(target: EvaluatePlan, crowned: registry.Crowned) -> None:
    """Keep what the alias names, and let go of what it named before."""
    name = f"{target.plan.model_name}-{registry.CHAMPION}"
    pin(target.plan.run, name, target.checkpoint)
    previous = crowned.previous or {}
    if previous.get("ckpt.run_id") in (None, target.plan.run.id) or "ckpt.uri" not in previous:
        return
    try:
        unpin(open_run(_run_of(previous["ckpt.uri"]), create=False), name)
    except CheckpointError:
        return  # that run is gone, and its pin with it


def _run_of(checkpoint_uri: str) -> str:
    return checkpoint_uri.rpartition("/")[0]
