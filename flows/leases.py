"""Short pins: retention keeps its hands off a checkpoint while it is being verified, registered or scored."""

from __future__ import annotations

from ckpt.checkpoint import Checkpoint
from ckpt.errors import CheckpointError, NotCommitted
from ckpt.pins import pin, unpin
from ckpt.run import Run

# A lease lapses by itself should the process that holds it die.
LEASE_S = 900.0


def hold(run: Run, checkpoint: Checkpoint, what: str = "lease") -> bool:
    """Take a lease, or renew it; False if the checkpoint is gone already."""
    try:
        pin(run, _name(checkpoint, what), checkpoint, deadline_s=LEASE_S)
    except NotCommitted:
        return False
    return True


def drop(run: Run, checkpoint: Checkpoint, what: str = "lease") -> None:
    """Give a lease back; one that can't be given back lapses."""
    try:
        unpin(run, _name(checkpoint, what))
    except CheckpointError:
        return


def _name(checkpoint: Checkpoint, what: str) -> str:
    return f"{what}-{checkpoint.attempt}"
