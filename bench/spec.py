"""What one measured process is asked to do; it travels to that process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

# What the checkpoint engine uses by default, and therefore what the raw limits are measured with.
WRITE_THREADS = 2
READ_THREADS = 4


@dataclass(frozen=True)
class Spec:
    """Sizes in bytes. `batch` and `window` (steps) are 0 until the limits have been measured."""

    size: int
    tensors: int
    threads: int
    device: str
    pairs: int
    every: tuple[int, ...]
    quick: bool
    folder: str
    batch: int = 0
    window: int = 0

    @property
    def repeats(self) -> int:
        """How often a single figure (a restore, a raw limit) is measured."""
        return 1 if self.quick else 3

    @property
    def memory_saves(self) -> int:
        """Saves over which memory is watched."""
        return 4 if self.quick else 12

    def settled(self, batch: int, window: int) -> Spec:
        """The same with the step that the limits' process calibrated."""
        return replace(self, batch=batch, window=window)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec in `text`."""
        plain = json.loads(text)
        return cls(**{**plain, "every": tuple(plain["every"])})
