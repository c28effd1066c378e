"""The MLflow run of a training run: one for all its launches. MLflow away is a warning, never the end of
training."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.overrides import ConfigError
from flows.project import project_dir
from flows.secrets import without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from ckpt.run import Run

TRACKING = "tracking.json"

# MLflow's own limits, lower ones of all its stores.
_PARAM_KEY, _PARAM_VALUE, _PARAMS_PER_CALL = 250, 500, 100

# Every call is bounded: a server that hangs costs seconds, in a thread that training does not wait for.
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Tracked:
    """An open MLflow run: its client, and where it is."""

    client: MlflowClient
    uri: str
    run_id: str
    experiment_id: str


def client(uri: str) -> MlflowClient:
    """A client with bounded time-outs. The folder of a sqlite database is made if it isn't there."""
    for name, value in _LIMITS.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow import MlflowClient

    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    # A database's registry looks a logged model up where the process as a whole tracks, whatever the client
    # says.
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def read(run: Run) -> dict[str, str] | None:
    """What the run knows about its MLflow run: `uri`, `run_id`, `experiment_id`; None before there is one."""
    try:
        found: dict[str, str] = json.loads(run.store.read(TRACKING, limit=1 << 16))
    except FileNotFoundError:
        return None
    return found


def open_run(run: Run, settings: Mapping[str, Any], config: Mapping[str, Any], launch: int) -> Tracked:
    """Begin the run's MLflow run, or go on with it: status RUNNING, params, the launch's config as an
    artifact.

    `settings` is the config's `tracking` node; `config` must be free of secrets. Raises whatever MLflow
    raises; the caller decides that it's a warning.
    """
    uri = settings["uri"]
    mlflow = client(uri)
    known = read(run)
    if known is not None and known["uri"] == without_password(uri):
        tracked = Tracked(mlflow, uri, known["run_id"], known["experiment_id"])
        mlflow.update_run(tracked.run_id, status="RUNNING")
    else:
        tracked = _create(mlflow, run, settings)
        page = {
            "uri": without_password(uri),
            "run_id": tracked.run_id,
            "experiment_id": tracked.experiment_id,
        }
        if known is not None:
            run.store.put(TRACKING, json.dumps(page).encode())
        elif not run.store.create(TRACKING, json.dumps(page).encode()):
            raise ConfigError(f"another flow opened an MLflow run for {run.uri} at the same moment")
    _log_params(tracked, config)
    _log_config(tracked, config, launch)
    return tracked


def end(tracked: Tracked, status: str) -> None:
    """Set FINISHED, KILLED or FAILED, with the time of now."""
    tracked.client.set_terminated(tracked.run_id, status=status)


def announce(tracked: Tracked, spool: Path) -> None:
    """Tell the metrics sender where its lines go: until this file is there, it spools."""
    spool.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=spool, delete=False, suffix=".tmp") as out:
        json.dump({"uri": tracked.uri, "run_id": tracked.run_id}, out)
    Path(out.name).replace(spool / TRACKING)


def _create(mlflow: MlflowClient, run: Run, settings: Mapping[str, Any]) -> Tracked:
    experiment = mlflow.get_experiment_by_name(settings["experiment"])
    if experiment is None:
        experiment_id = _create_experiment(mlflow, settings["uri"], settings["experiment"])
    else:
        experiment_id = experiment.experiment_id
    tags = {"mlflow.runName": run.name, "ckpt.run_id": run.id, "ckpt.run_uri": run.uri}
    tags |= {str(k): str(v) for k, v in settings["tags"].items()}
    found = mlflow.search_runs(
        [experiment_id], filter_string=f"tags.`ckpt.run_id` = '{run.id}'", max_results=1
    )
    created = found[0] if found else mlflow.create_run(experiment_id, run_name=run.name, tags=tags)
    return Tracked(mlflow, settings["uri"], created.info.run_id, experiment_id)


def _create_experiment(mlflow: MlflowClient, uri: str, name: str) -> str:
    # A database would put artifacts below whatever folder this process happens to run in.
    location = None
    if uri.startswith("sqlite:///"):
        folder = (
            Path(uri.removeprefix("sqlite:///")).absolute().parent
            / "mlartifacts"
            / re.sub(r"[^\w.-]", "-", name)
        )
        location = folder.as_uri()
    try:
        return mlflow.create_experiment(name, artifact_location=location)
    except Exception:
        made = mlflow.get_experiment_by_name(name)  # by another run, a moment ago
        if made is None:
            raise
        return str(made.experiment_id)


def _log_params(tracked: Tracked, config: Mapping[str, Any]) -> None:
    """Log what isn't logged yet. A param can't change: a new value goes to the tag `changed.<key>`."""
    from mlflow.entities import Param, RunTag

    have = tracked.client.get_run(tracked.run_id).data
    params, tags = [], []
    for key, value in flat(config):
        name, text = _param_key(key), _param_value(value)
        if name not in have.params:
            params.append(Param(name, text))
        elif have.params[name] != text and have.tags.get(f"changed.{name}") != text:
            tags.append(RunTag(f"changed.{name}", text))
    for at in range(0, max(len(params), len(tags)), _PARAMS_PER_CALL):
        upto = at + _PARAMS_PER_CALL
        tracked.client.log_batch(tracked.run_id, params=params[at:upto], tags=tags[at:upto])


def _log_config(tracked: Tracked, config: Mapping[str, Any], launch: int) -> None:
    tracked.client.log_dict(tracked.run_id, dict(config), f"config/launch-{launch:05d}.json")


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values of nested dicts; lists are leaves."""
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, dotted + ".")
        else:
            yield dotted, value


def _param_key(key: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", key)[:_PARAM_KEY]


def _param_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _PARAM_VALUE else text[: _PARAM_VALUE - 3] + "..."


def spool_dir(run: Run) -> Path:
    """Where this machine keeps metrics of a run that MLflow has not taken yet."""
    return project_dir() / "runs" / ".spool" / run.id
