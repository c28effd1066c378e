"""Mixed precision: autocast, and a gradient scaler where the number format needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SKIPPED = 50  # a scale halved so often in a row is below any use


class Precision:
    """How numbers are held in forward and backward; a state entry of the checkpoint.

    ``name`` is fp32, bf16 or fp16; fp16 comes with a gradient scaler whose scale and growth count are
    restored. A checkpoint of another precision is taken too, and ``say`` is told what does not carry over.
    """

    def __init__(self, name: str, device: torch.device, say: Callable[[str], None]) -> None:
        if name not in ("fp32", *LOW):
            raise ValueError(f"trainer.precision={name!r} is unknown: choose fp32, bf16 or fp16")
        self.name = name
        self._device = device.type
        self._say = say
        self._skipped = 0
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device, LOW[self.name])

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, with the loss scaled where a scaler is used."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring gradients to their true size before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False if the scaler skipped the update because gradients were not finite.

        Raises FloatingPointError when every one of many updates in a row had to be skipped.
        """
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self._skipped = 0
            return True
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise FloatingPointError(
                f"gradients were not finite in {self._skipped} updates in a row, "
                f"at a loss scale of {before:g}: lower optim.lr, or train with trainer.precision=bf16"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """The format and the scaler's numbers."""
        return {"name": self.name, "scaler": None if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a scaler's numbers, or say why they are left behind."""
        if state["name"] != self.name:
            left = (
                "its gradient scaler starts anew" if self.scaler is not None else "no gradient scaler is used"
            )
            self._say(f"precision was {state['name']} and is {self.name} now: {left}")
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(dict(state["scaler"]))
