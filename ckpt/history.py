"""The commits of a run as keep policies see them, kept up to date by rank 0 while it commits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from ckpt import discover, pins, retention
from ckpt.attempts import Attempt
from ckpt.checkpoint import Checkpoint, Fact
from ckpt.errors import CheckpointError
from ckpt.policies import KeepPolicy
from ckpt.run import Run


class History:
    """Used from one background thread; `last` may be read from any."""

    def __init__(self, run: Run, launch: int, keep: KeepPolicy, say: Callable[[str], None]) -> None:
        """Reads nothing yet: what the run holds is looked up at the first commit, in the background."""
        self.last: Checkpoint | None = None
        self._run = run
        self._launch = launch
        self._keep = keep
        self._say = say
        self._facts: list[Fact] | None = None

    def committed(self, attempt: Attempt) -> list[str]:
        """Take a commit in; the names of the attempts that no policy and no pin keeps any more."""
        self.last = Checkpoint(
            run_uri=self._run.uri,
            attempt=attempt.name,
            step=attempt.step,
            launch=self._launch,
            run_id=self._run.id,
        )
        if getattr(self._keep, "keeps_all", False):
            return []  # a run may hold thousands, and reading their manifests would be felt
        try:
            if self._facts is None:
                self._facts = self._read()
            facts = [fact for fact in self._facts if fact.attempt != attempt.name]
            facts.insert(
                0, Fact(attempt.name, attempt.step, self._launch, attempt.metrics, dt.datetime.now(dt.UTC))
            )
            doomed = retention.doomed(facts, self._keep, pinned=set(pins.pinned(self._run.store)))
            self._facts = [fact for fact in facts if fact.attempt not in set(doomed)]
            return list(doomed)
        except Exception as error:  # also of a policy: what is committed stays so
            self._say(f"nothing is pruned after step {attempt.step}: {error}")
            return []

    def _read(self) -> list[Fact]:
        facts = []
        for checkpoint in discover.checkpoints(self._run.uri):
            try:
                facts.append(checkpoint.fact)
            except CheckpointError as error:
                self._say(f"{checkpoint.attempt} is left alone: {error}")
        return facts
