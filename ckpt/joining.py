"""How the ranks of a launch come together: the team, and the launch that rank 0 begins for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt import errors
from ckpt.errors import CheckpointError
from ckpt.launches import Launch, begin_launch
from ckpt.run import Run
from ckpt.team import Solo, Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def join_team(process_group: ProcessGroup | None, timeout_s: float) -> Team:
    """The team of a process group, which all its ranks have to ask for at once; without one, a team of
    one.
    """
    if process_group is None:
        return Solo()
    from ckpt.coordinate import Group

    return Group(process_group, timeout_s)


def shared_launch(
    team: Team,
    run: Run,
    config: Mapping[str, Any] | None,
    overrides: Sequence[str],
    say: Callable[[str], None],
) -> Launch:
    """The launch that rank 0 begins. Raises on every rank what `begin_launch` raised on rank 0."""
    begun: list[Launch] = []
    failed: list[CheckpointError] = []

    def begin() -> dict[str, Any]:
        owner = os.environ.get("CKPT_LAUNCH_OWNER", "")
        try:
            launch = begin_launch(run, owner=owner, config=config, overrides=list(overrides), say=say)
        except CheckpointError as error:
            failed.append(error)
            return {"kind": type(error).__name__, "error": str(error)}
        begun.append(launch)
        return {"number": launch.number}

    told = team.share("launch", begin)
    if failed:
        raise failed[0]
    if "error" in told:
        raise named_error(told["kind"], f"rank 0: {told['error']}")
    return begun[0] if begun else Launch(told["number"], {}, None, None)


def named_error(kind: str, text: str) -> CheckpointError:
    """The engine's error of that class name, or its base class."""
    found = getattr(errors, kind, CheckpointError)
    known = isinstance(found, type) and issubclass(found, CheckpointError)
    return found(text) if known else CheckpointError(text)
