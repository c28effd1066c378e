"""Decide what a command means for the run it names, before anything is made or started."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.checkpoint import Checkpoint
from ckpt.discover import checkpoints, find, newest_valid
from ckpt.errors import NotCommitted, RunBusy
from ckpt.launches import Launch, list_launches
from ckpt.liveness import is_live
from ckpt.names import LOGS, join
from ckpt.run import Run, open_run, read_run_file
from ckpt.store import open_store
from ckpt.values import decode
from flows import commands
from flows.config import Composed, group_label, load
from flows.names import new_name
from flows.overrides import (
    ConfigError,
    check_run_name,
    flag,
    merged,
    normalise,
    refuse_misspelt_options,
    split,
    take,
)
from flows.progress import count
from flows.project import project_dir, shown
from flows.storage import is_folder, root_of
from flows.tracking import flat, spool_dir

# What changes in these changes what is learned: a resumed run refuses it unless forced.
_UNSAFE = ("model", "data", "seed")
# What differs in these says where a run is, or is written by it: never a difference worth telling.
_SILENT = ("run", "project", "tracking.uri")

RESUME_OPTIONS = ("run", "which", "force", "takeover")
EVALUATE_OPTIONS = ("run", "which")


@dataclass(frozen=True)
class Plan:
    """What will be trained and where. `finished` says that nothing is left to do, `step` how far the run had
    come.

    `notes` are lines a person should see first.
    """

    run: Run
    composed: Composed
    overrides: list[str]
    which: str = "latest"
    takeover: bool = False
    finished: bool = False
    step: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name

    @property
    def model_name(self) -> str:
        """What the run's checkpoints are registered as."""
        return registered_name(self.composed)

    @property
    def log_dir(self) -> Path | None:
        """Where logs of ranks go: into the run, or on this machine if the run is in an object store."""
        if is_folder(self.run.uri):
            return self.run.store.path(LOGS)
        return project_dir() / "runs" / ".logs" / f"{self.name}-{self.run.id[:8]}"

    @property
    def spool(self) -> Path:
        """Where metrics wait for MLflow."""
        return spool_dir(self.run)

    def shown_logs(self) -> str:
        """The log folder as a person would type it."""
        return shown(str(self.log_dir))

    def opening(self) -> str:
        """The composed config in short: what was chosen of each group, and what was overridden."""
        groups = ("model", "data", "optim", "schedule", "strategy")
        chosen = [f"{g}={self.composed.choices[g]}" for g in groups if self.composed.choices.get(g)]
        over = [t for t in self.overrides if split(t).key not in (*self.composed.choices, "run")]
        return "\n  ".join(["config: " + " ".join(chosen), *([" ".join(over)] if over else [])])

    def headline(self, params: int | None) -> str:
        """`run brave-otter  runs/brave-otter  2.4 M params, saves every 20 steps`"""
        save = self.composed.values["checkpoint"]["save"]
        policy = str(save["_target_"]).rpartition(".")[2]
        saves = {
            "EverySteps": lambda: f"saves every {save['every']} steps",
            "EveryMinutes": lambda: f"saves every {save['minutes']:g} minutes",
        }.get(policy, lambda: f"saves by {policy}")()
        size = f"{count(params)} params, " if params else ""
        line = f"run {self.name}  {shown(self.run.uri)}  {size}{saves}"
        return line if is_folder(self.run.uri) else f"{line}\n  logs of its ranks: {self.shown_logs()}"


def registered_name(composed: Composed) -> str:
    """The name under which checkpoints are registered: the configured one, or the model's group choice."""
    return str(
        composed.values["tracking"]["registered_model"]
        or group_label(composed.choices.get("model"))
        or "model"
    )


def plan_train(overrides: Sequence[str], owner: str, default_name: str) -> Plan:
    """What `train` means: a new run, or the same flow run's own run going on.

    `owner` identifies the flow run over its retries. ConfigError or RunBusy where it can't be done; a new
    run's folder is made only when everything else has been checked.
    """
    texts = normalise(overrides)
    options, _ = take(texts, ("run",))
    name = check_run_name(options.get("run", default_name))
    composed = load("train", texts)
    uri = join(root_of(composed.values["storage"]), name)
    run = _existing(uri)
    if run is None:
        made = open_run(uri, create=True, info={"project": composed.values["project"], "flow": owner})
        if made.info.get("flow") == owner:
            return Plan(made, composed, composed.overrides)
        run = made
    launches = list_launches(run.store)
    resume = commands.flow("resume", name, composed.overrides)
    if run.info.get("flow") != owner or _saved_config(launches) not in (None, composed.saved):
        _refuse_if_live(run, launches)
        step = newest_step(run.uri)
        if is_finished(launches, step, composed):
            return Plan(run, composed, composed.overrides, finished=True, step=step)
        at = f", at step {step}" if step is not None else ""
        raise ConfigError(f"there is already a run {name} in {shown(uri)}{at}. To go on with it:\n  {resume}")
    step = newest_step(run.uri)
    return Plan(
        run, composed, composed.overrides, finished=is_finished(launches, step, composed), step=step,
        notes=(f"going on with run {name}",) if launches else (),
    )  # fmt: skip


def plan_resume(overrides: Sequence[str]) -> Plan:
    """What `resume` means: the saved overrides followed by the new ones, held against what the run was
    trained with.

    ConfigError for unsafe differences without `force=true`, RunBusy while its trainer lives, NotCommitted
    with the names of other runs if there is none of this name. Writes nothing.
    """
    options, new = take(normalise(overrides), RESUME_OPTIONS)
    refuse_misspelt_options(new, RESUME_OPTIONS)
    run = find_run(options, new)
    launches = list_launches(run.store)
    takeover = flag(options, "takeover")
    last = launches[-1] if launches else None
    texts = merged(saved_overrides(launches), new)
    composed = load("train", texts)
    differences = compare(_saved_config(launches), composed.saved)
    unsafe = [d for d in differences if d.key.partition(".")[0] in _UNSAFE]
    if unsafe and not flag(options, "force"):
        listed = "\n".join(f"  {d}" for d in unsafe)
        raise ConfigError(
            f"these differ from what {run.name} was trained with, and change what is learned:\n{listed}\n"
            "Nothing was changed. To go on with them all the same, add force=true"
        )
    step = newest_step(run.uri)
    which = options.get("which", "latest")
    if not takeover:
        _refuse_if_live(run, launches)
    notes = [f"changed: {d}" for d in differences]
    done = which == "latest" and is_finished(launches, step, composed)
    if done:
        # Nothing is left to do only if what was reached proves valid; else it is trained again from before.
        newest = newest_valid(run, quick=False, say=notes.append)
        done = newest is not None and newest.step == step
    which = _attempt_for(which, run, composed)
    if last is None:
        notes.append(f"run {run.name} has not begun to train yet: it starts fresh")
    return Plan(run, composed, composed.overrides, which, takeover, done, step, tuple(notes))


@dataclass(frozen=True)
class EvaluatePlan:
    """A checkpoint to score. `new` are the overrides given now, `which` the words that named the
    checkpoint."""

    plan: Plan
    checkpoint: Checkpoint
    which: str
    new: list[str]


def plan_evaluate(overrides: Sequence[str]) -> EvaluatePlan:
    """What `evaluate` means: which checkpoint, with the settings its run was trained with. Writes nothing.

    ConfigError or CheckpointError if there is no such run or checkpoint.
    """
    options, new = take(normalise(overrides), EVALUATE_OPTIONS)
    refuse_misspelt_options(new, EVALUATE_OPTIONS)
    run = find_run(options, new)
    composed = load("train", merged(saved_overrides(list_launches(run.store)), new))
    which = options.get("which", "latest")
    checkpoint = find(run, _attempt_for(which, run, composed))
    return EvaluatePlan(Plan(run, composed, composed.overrides), checkpoint, which, new)


def _attempt_for(which: str, run: Run, composed: Composed) -> str:
    """`which` in the words of the checkpoint engine, which knows neither MLflow nor what counts as best
    here."""
    if which.startswith("alias:"):
        return attempt_of_alias(which, run, composed)
    if which == "best":
        return _best(run, composed)
    return which


def _best(run: Run, composed: Composed) -> str:
    """The attempt that is best by the metric `checkpoint.keep` names, or by the validation loss."""
    keep = composed.values["checkpoint"]["keep"]
    metric, direction = keep.get("metric", "val_loss"), keep.get("direction", "min")
    try:
        return find(run, f"best:{metric}:{direction}").attempt
    except NotCommitted as error:
        raise NotCommitted(
            f"{error}. Train with trainer.eval_every=N to have {metric} in the checkpoints, or name what "
            "they have, as in which=best:loss:min"
        ) from error


def attempt_of_alias(which: str, run: Run, composed: Composed) -> str:
    """The attempt that `alias:NAME` names, which has to be one of this run's."""
    from flows import registry, tracking

    alias, name = which.removeprefix("alias:"), registered_name(composed)
    uri = composed.values["tracking"]["uri"]
    if uri is None:
        raise ConfigError(f"which={which} needs MLflow, which this run does without (tracking=none)")
    version = registry.by_alias(tracking.client(uri), name, alias)
    if version is None:
        raise ConfigError(f"which={which}: the model {name} has no alias {alias} in {uri}")
    if version.tags.get("ckpt.run_id") != run.id:
        raise ConfigError(
            f"which={which}: models:/{name}@{alias} is {version.tags.get('ckpt.uri', 'no checkpoint')}, "
            f"which is not one of run {run.name}"
        )
    return str(version.tags["ckpt.attempt"])


def find_run(options: dict[str, str], overrides: Sequence[str]) -> Run:
    """The run that `run=` names, under the storage that the overrides name. NotCommitted if there is none."""
    if "run" not in options:
        raise ConfigError("which run? Say run=NAME")
    name = check_run_name(options["run"])
    keys = ("storage", "storage.root", "local", "experiment")
    where = load(
        "train", [t for t in overrides if split(t).key in keys or split(t).key.startswith("storage.")]
    )
    return open_run(join(root_of(where.values["storage"]), name), create=False)


def unused_name(overrides: Sequence[str]) -> str:
    """A name that no run has under the storage that the overrides name."""
    root = root_of(load("train", overrides).values["storage"])
    return new_name(lambda name: read_run_file(open_store(join(root, name))) is not None)


def saved_overrides(launches: Sequence[Launch]) -> list[str]:
    """The overrides of the newest launch that recorded any."""
    for launch in reversed(launches):
        if launch.info.get("overrides") is not None:
            return [str(t) for t in launch.info["overrides"]]
    return []


def newest_step(uri: str) -> int | None:
    """The newest committed checkpoint's step; None if there is none."""
    found = [c for c in checkpoints(uri) if not c.abandoned]
    return found[0].step if found else None


def is_finished(launches: Sequence[Launch], step: int | None, composed: Composed) -> bool:
    """Whether nothing is left to train: the newest checkpoint is the last step that is asked for."""
    return bool(launches) and step is not None and step >= composed.values["trainer"]["max_steps"]


@dataclass(frozen=True)
class Difference:
    """A setting whose value differs from the saved one; None where it has none."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)}"


def compare(old: dict[str, Any] | None, new: dict[str, Any]) -> list[Difference]:
    """Every setting that differs, by its dotted key; none if nothing was saved."""
    if old is None:
        return []
    before, after = dict(flat(old)), dict(flat(new))
    keys = [*before, *(k for k in after if k not in before)]
    return [
        Difference(k, before.get(k), after.get(k))
        for k in keys
        if before.get(k) != after.get(k) and k not in _SILENT and not k.startswith("storage.")
    ]


def new_owner() -> str:
    """An identity for a flow run that Prefect does not know yet."""
    return uuid.uuid4().hex


def _saved_config(launches: Sequence[Launch]) -> dict[str, Any] | None:
    for launch in reversed(launches):
        if launch.info.get("config") is not None:
            config: dict[str, Any] = decode(launch.info["config"])
            return config
    return None


def _existing(uri: str) -> Run | None:
    try:
        return open_run(uri, create=False)
    except NotCommitted:
        return None


def _refuse_if_live(run: Run, launches: Sequence[Launch]) -> None:
    if not launches:
        return
    last = launches[-1]
    found = is_live(run.store, last.number, last.info, ended=last.end is not None, say=_nothing)
    if found.live:
        at = f" at step {found.step}" if found.step is not None else ""
        raise RunBusy(
            f"run {run.name} is being trained by host {found.host}, pid {found.pid}{at} ({found.reason}). "
            "Wait for it or stop it; if you are sure that it is lost, add takeover=true to resume"
        )


def _nothing(_: str) -> None:
    return None


def _text(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
