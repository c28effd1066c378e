"""Where a launch comes from and under which conditions it runs; rank 0 records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt import environment
from ckpt.checkpoint import Checkpoint
from ckpt.launches import Launch, parent_facts, record_parent
from ckpt.run import Run
from ckpt.team import Team


class Origin:
    """`parent` is the checkpoint that this launch went on from, None for a fresh one."""

    def __init__(
        self,
        run: Run,
        launch: Launch,
        team: Team,
        config: Mapping[str, Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.parent: Checkpoint | None = None
        self._run = run
        self._launch = launch
        self._team = team
        self._config = config
        self._say = say
        self._recorded = False
        self._versions = environment.versions()

    def went_on_from(self, found: Checkpoint | None) -> None:
        """Record what was restored; say where conditions differ from those it was saved under."""
        self.parent = found
        self._record()
        if found is not None and self._team.rank == 0:
            now = self._versions | self._environment()
            then = found.manifest.versions | found.manifest.environment
            for line in environment.differences(then, now):
                self._say(f"the bits of this run may differ from those of the saved one: {line}")

    def lead(self) -> dict[str, Any]:
        """What rank 0 adds to its part of every checkpoint."""
        if not self._recorded:
            self._record()
        return {
            "parent": None if self.parent is None else parent_facts(self._run, self.parent),
            "config": self._config,
            "versions": self._versions,
            "environment": self._environment(),
        }

    def _record(self) -> None:
        self._recorded = True
        if self._team.rank == 0:
            record_parent(self._run, self._launch, self.parent)

    def _environment(self) -> dict[str, Any]:
        return environment.environment() | {"world_size": self._team.world_size}
