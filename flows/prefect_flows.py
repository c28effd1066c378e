"""The flows as Prefect knows them: what a deployment points at, and what the command lines run."""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

from prefect import Flow, flow, get_run_logger
from prefect import runtime as prefect_runtime
from prefect.states import Completed, Failed, State
from pydantic import Field

from ckpt.errors import CheckpointError
from flows import evaluation, summary
from flows.names import as_run_name
from flows.overrides import ConfigError, quote
from flows.plan import Plan, new_owner, plan_evaluate, plan_resume, plan_train
from flows.session import Session
from flows.terminal import Terminal
from flows.training_flow import catch_up, follow

Overrides = Annotated[
    list[str], Field(description="Hydra overrides, for example model=mlp or trainer.max_steps=400")
]
RunName = Annotated[str, Field(description="The run's name: its folder under storage.root")]
Which = Annotated[str, Field(description="latest, best, step:N, alias:NAME, or an attempt's folder name")]

_handed_over: list[Session] = []
_owners: dict[str, str] = {}


def hand_over(session: Session) -> None:
    """Let the next flow run in this process follow a session that was started before it."""
    _handed_over.append(session)


def call(which: str, name: str, /, **parameters: Any) -> State[Any]:
    """Run `train`, `resume` or `evaluate` here and now, under a flow run of that name; its final state."""
    flows: dict[str, Flow[..., Any]] = {"train": train, "resume": resume, "evaluate": evaluate}
    chosen = flows[which]
    return cast(State[Any], chosen.with_options(flow_run_name=name)(**parameters, return_state=True))


@flow(name="train", persist_result=False)
def train(overrides: Overrides = []) -> Any:  # noqa: B006
    """Train a run. A retry of the same flow run goes on from the newest valid checkpoint."""
    return _train_or_resume(lambda: _plan_train(overrides))


@flow(name="resume", persist_result=False)
def resume(run: RunName, overrides: Overrides = []) -> Any:  # noqa: B006
    """Go on with a run from its newest checkpoint that proves valid."""
    return _train_or_resume(lambda: plan_resume([*overrides, f"run={quote(run)}"]))


@flow(name="evaluate", persist_result=False)
def evaluate(run: RunName, which: Which = "latest", overrides: Overrides = []) -> Any:  # noqa: B006
    """Score a checkpoint on validation data, and make it champion if it is better."""
    terminal = _terminal()
    try:
        target = plan_evaluate([*overrides, f"run={quote(run)}", f"which={quote(which)}"])
        return Completed(message=evaluation.run(target, terminal.line))
    except (ConfigError, CheckpointError) as error:
        terminal.line(str(error))
        return Failed(message=str(error))


def _plan_train(overrides: list[str]) -> Plan:
    flow_run = str(prefect_runtime.flow_run.id)
    return plan_train(overrides, _owners.get(flow_run, flow_run), as_run_name(prefect_runtime.flow_run.name))


def _train_or_resume(make: Any) -> State[Any]:
    if _handed_over:
        session = _handed_over.pop()
        flow_run = str(prefect_runtime.flow_run.id)
        _owners[flow_run] = str(session.plan.run.info.get("flow") or new_owner())
    else:
        terminal = _terminal()
        try:
            plan = make()
        except (ConfigError, CheckpointError) as error:
            terminal.line(str(error))
            return Failed(message=str(error))
        if not plan.finished:
            terminal.line(plan.opening())
        for note in plan.notes:
            terminal.line(note)
        session = Session(plan, terminal, time.monotonic())
        if not plan.finished:
            session.start()
    if session.plan.finished:
        catch_up(session.plan, session.terminal.line)
        session.terminal.line(summary.nothing_to_do(session.plan))
        return Completed(message=f"finished already, at step {session.plan.step}")
    return follow(session)


def _terminal() -> Terminal:
    """Lines go to this process's output; those of a deployment's run also to its log in Prefect."""
    if prefect_runtime.deployment.id is None:
        return Terminal()
    return Terminal(echo=get_run_logger().info)
