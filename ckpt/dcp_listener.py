"""A DCP storage writer that writes nothing: it keeps what the planner gave to this rank."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import (
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt.tensor_kinds import local_part


class PlanListener(StorageWriter):
    """Collects `(write item, live local tensor)` of this rank in `items`."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, Tensor]] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:  # noqa: ARG002
        """Forget what an earlier planning left."""
        self.items = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Take the planner's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the planner's plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep this rank's items and their tensors."""
        self.items = [(item, self._resolve(item, planner)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is written, so there is nothing to finish."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Any id will do: none is used."""
        return True

    def _resolve(self, item: WriteItem, planner: SavePlanner) -> Tensor:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{item.index.fqn} is no tensor")
        return local_part(tensor)
