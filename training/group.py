"""A process's place among the ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks, as torchrun announces it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart: int

    @classmethod
    def from_environment(cls) -> Group:
        """Read torchrun's variables; a process started by hand is the only rank."""
        read = os.environ.get
        return cls(
            int(read("RANK", "0")),
            int(read("WORLD_SIZE", "1")),
            int(read("LOCAL_RANK", "0")),
            int(read("LOCAL_WORLD_SIZE", "1")),
            int(read("TORCHELASTIC_RESTART_COUNT", "0")),
        )
