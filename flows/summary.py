"""The closing words of a flow: what was committed, what it cost, and the exact commands to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.discover import checkpoints
from ckpt.listing import time_text
from flows import commands
from flows.plan import Plan
from flows.progress import Progress
from flows.project import shown
from training.launch import Outcome

if TYPE_CHECKING:
    from flows.commits import Commits
    from flows.session import Session


def finished(session: Session, commits: Commits) -> str:
    """After the last step."""
    plan, progress = session.plan, session.progress
    lines = [f"finished {progress.step} steps in {session.elapsed():.0f} s{_loss(progress)}", _saves(session)]
    if commits.bad:
        lines.append(f"not what was committed: {', '.join(commits.bad)}")
    if commits.tracked is not None and plan.composed.values["tracking"]["register"]:
        lines.append(
            f"registered as models:/{plan.model_name}; evaluation moves models:/{plan.model_name}@champion"
        )
    more = f"trainer.max_steps={2 * progress.max_steps}"
    lines += _next(
        commands.flow("evaluate", plan.name, plan.overrides),
        commands.flow("resume", plan.name, plan.overrides, more),
        f"{commands.ckpt('ls', plan.run.uri)}   |   make ui",
    )
    return "\n".join(lines)


def stopped(session: Session) -> str:
    """After a stop that was asked for."""
    plan = session.plan
    lines = [f"stopped at step {session.progress.step}/{session.progress.max_steps}", _saves(session)]
    lines += _next(commands.flow("resume", plan.name, plan.overrides))
    return "\n".join(lines)


def failed(session: Session, outcome: Outcome) -> str:
    """After a failure."""
    plan = session.plan
    at = f" at step {outcome.last_step}" if outcome.last_step else ""
    lines = [f"{outcome.state}{at}: {outcome.cause}"]
    if outcome.state == "failed":
        lines += [_saves(session), *_next(commands.flow("resume", plan.name, plan.overrides))]
    return "\n".join(lines)


def nothing_to_do(plan: Plan) -> str:
    """For a run that has finished already."""
    asked = plan.composed.values["trainer"]["max_steps"]
    more = f"trainer.max_steps={2 * max(asked, plan.step or 0)}"
    lines = [f"run {plan.name} has finished: step {plan.step} of {asked}"]
    lines += _next(
        commands.flow("evaluate", plan.name, plan.overrides),
        commands.flow("resume", plan.name, plan.overrides, more),
    )
    return "\n".join(lines)


def _next(*lines: str) -> list[str]:
    return [f"{'next:' if i == 0 else '':5}  {line}" for i, line in enumerate(lines)]


def _loss(progress: Progress) -> str:
    return f", loss {progress.loss:.4g}" if progress.loss is not None else ""


def _saves(session: Session) -> str:
    plan, saves = session.plan, session.progress.saves
    kept = [c for c in checkpoints(plan.run.uri) if not c.abandoned]
    newest = f"newest step {kept[0].step}" if kept else "none kept"
    text = f"checkpoints: {saves['committed']} committed, {len(kept)} kept in {shown(plan.run.uri)}, {newest}"
    if saves["skipped"]:
        text += f", {saves['skipped']} skipped while one was being written"
    if saves["failed"]:
        text += f", {saves['failed']} failed"
    cost = _cost(session.progress)
    return f"{text}\n{cost}" if cost else text


def _cost(progress: Progress) -> str:
    """What saving took from training, from the engine's own statistics."""
    committed, trained_s = progress.cost("committed"), progress.cost("trained_s")
    if not committed or not trained_s:
        return ""
    stall_s, join_s, slowed_s = (progress.cost(name) for name in ("stall_s", "join_s", "slowed_s"))
    text = f"cost: stall {time_text(stall_s)} and join {time_text(join_s)} in all, "
    text += f"{_percent((stall_s + join_s) / trained_s)} of {time_text(trained_s)} of training"
    if slowed_s > 0:
        text += f"; steps beside a save took {time_text(slowed_s)} longer (estimated)"
    text += f"; a save every {time_text(trained_s / committed)}, "
    return text + f"durable after {time_text(progress.cost('durable_s') / committed)} on average"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
