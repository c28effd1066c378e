"""Committed checkpoints as MLflow models: small pointers, not copies. Every step can be repeated without
harm."""

from __future__ import annotations

import json
import math
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from ckpt.checkpoint import Checkpoint
    from flows.tracking import Tracked

CHAMPION = "champion"
LOADER = "flows.pointer"
POINTER = "pointer.json"


class Registered(NamedTuple):
    """A checkpoint's logged model and its version in the registry."""

    model_id: str
    version: str


def registered_attempts(tracked: Tracked, name: str, run_id: str) -> set[str]:
    """Attempts of a run (`ckpt.run_id`) that have a version of the model `name`."""
    query = f"name = '{name}' and tag.`ckpt.run_id` = '{run_id}'"
    found: set[str] = set()
    token = None
    while True:
        page = tracked.client.search_model_versions(query, max_results=200, page_token=token)
        found |= {v.tags["ckpt.attempt"] for v in page if "ckpt.attempt" in v.tags}
        token = page.token
        if not token:
            return found


def register(tracked: Tracked, name: str, checkpoint: Checkpoint, run_id: str) -> Registered:
    """Make sure that a checkpoint has a loadable model and a version of `name`; doing it again finds them.

    Raises what MLflow raises.
    """
    tags = {
        "ckpt.uri": checkpoint.uri,
        "ckpt.attempt": checkpoint.attempt,
        "ckpt.run_id": run_id,
        "ckpt.step": str(checkpoint.step),
        "ckpt.launch": str(checkpoint.launch),
        **_cost_tags(checkpoint.manifest.costs),
    }
    model_id = _logged_model(tracked, name, checkpoint, tags)
    return Registered(model_id, _version(tracked, name, model_id, tags))


def _logged_model(tracked: Tracked, name: str, checkpoint: Checkpoint, tags: dict[str, str]) -> str:
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    client = tracked.client
    query = f"tags.`ckpt.attempt` = '{checkpoint.attempt}' AND tags.`ckpt.run_id` = '{tags['ckpt.run_id']}'"
    found = client.search_logged_models([tracked.experiment_id], filter_string=query, max_results=1)
    model = (
        found[0]
        if found
        else client.create_logged_model(
            tracked.experiment_id,
            f"{name}-step-{checkpoint.step}",
            source_run_id=tracked.run_id,
            tags=tags,
            params={"step": str(checkpoint.step)},
        )
    )
    if model.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory() as folder:
            write_pointer(Path(folder), checkpoint, model, tracked.run_id)
            client.log_model_artifacts(model.model_id, folder)
        client.log_outputs(tracked.run_id, [LoggedModelOutput(model.model_id, step=checkpoint.step)])
        for key, value in _numbers(checkpoint.metrics).items():
            client.log_metric(tracked.run_id, key, value, step=checkpoint.step, model_id=model.model_id)
        client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def write_pointer(folder: Path, checkpoint: Checkpoint, model: Any, run_id: str) -> None:
    """The two files of a pointer model: MLmodel, and the checkpoint's address."""
    from mlflow.models import Model

    page = Model(
        artifact_path=model.artifact_location,
        run_id=run_id,
        model_id=model.model_id,
        model_uuid=model.model_id,
    )
    page.add_flavor(
        "python_function",
        loader_module=LOADER,
        data=POINTER,
        env={},
        python_version=platform.python_version(),
    )
    page.save(str(folder / "MLmodel"))
    address = {"uri": checkpoint.uri, "step": checkpoint.step, "attempt": checkpoint.attempt}
    (folder / POINTER).write_text(json.dumps(address), encoding="utf-8")


def _version(tracked: Tracked, name: str, model_id: str, tags: dict[str, str]) -> str:
    client = tracked.client
    query = f"name = '{name}' and tag.`ckpt.attempt` = '{tags['ckpt.attempt']}'"
    for version in client.search_model_versions(query, max_results=10):
        if version.tags.get("ckpt.run_id") == tags["ckpt.run_id"]:
            return str(version.version)
    _ensure_model(client, name)
    made = client.create_model_version(
        name,
        f"models:/{model_id}",
        run_id=tracked.run_id,
        tags=tags,
        model_id=model_id,
        await_creation_for=0,
    )
    return str(made.version)


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise


def by_alias(client: MlflowClient, name: str, alias: str) -> Any | None:
    """The model version an alias names, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


class Crowned(NamedTuple):
    """Whether the champion changed, the score to beat, and the tags of the version that held the alias
    before."""

    moved: bool
    before: float | None
    previous: dict[str, str] | None


def crown(client: MlflowClient, name: str, version: str, score: float) -> Crowned:
    """Record a version's validation loss, and give it the alias if no champion has a better one.

    A loss that is not a finite number never becomes champion.
    """
    client.set_model_version_tag(name, version, "val_loss", repr(score))
    champion = by_alias(client, name, CHAMPION)
    before = None
    if champion is not None and "val_loss" in champion.tags:
        before = float(champion.tags["val_loss"])
    previous = dict(champion.tags) if champion is not None else None
    if not math.isfinite(score):
        return Crowned(False, before, previous)
    if champion is not None and str(champion.version) == version:
        return Crowned(False, before, previous)
    if before is not None and math.isfinite(before) and before <= score:
        return Crowned(False, before, previous)
    client.set_registered_model_alias(name, CHAMPION, version)
    return Crowned(True, before, previous)


def _cost_tags(costs: dict[str, Any]) -> dict[str, str]:
    """What the save cost, by the names of its manifest, each with its unit."""
    return {f"ckpt.cost.{name}": f"{value:.6g}" for name, value in _numbers(costs).items()}


def _numbers(metrics: Any) -> dict[str, float]:
    return {
        str(k): float(v)
        for k, v in (metrics or {}).items()
        if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
    }
