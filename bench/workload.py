"""The work that every engine is measured beside: a state of a stated size and a step that trains it."""

from __future__ import annotations

import time
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from bench.spec import layer_width, layers_of

_LONGER_THAN_STAGING = 1.5
_LEAST_STEP_S = 0.02
_LARGEST_BATCH = 4096
_TRIES = 3


class Net(nn.Module):
    """A deep stack of square layers with residual connections, so that any depth trains."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as `x`."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


class Workload:
    """Model, optimizer and the two halves of a training step. `batch` counts samples."""

    def __init__(self, size: int, tensors: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.width = layer_width(size, tensors)
        self.model = Net(self.width, layers_of(tensors)).to(self.device)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(1, self.width, device=self.device)
        self.forward_backward(1)
        self.update()

    @property
    def state(self) -> dict[str, Any]:
        """The live objects, as a checkpoint manager takes them."""
        return {"model": self.model, "optim": self.optim}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, live, by a name of its own."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for slot, value in self.optim.state[parameter].items():
                found[f"optim.{name}.{slot}"] = value
        return found

    def forward_backward(self, batch: int) -> None:
        """The part of a step that changes no parameter and no optimizer state."""
        if len(self._inputs) != batch:
            self._inputs = torch.randn(batch, self.width, device=self.device)
        self.optim.zero_grad(set_to_none=False)
        self.model(self._inputs).square().mean().backward()

    def update(self) -> None:
        """The part of a step that changes the state."""
        self.optim.step()

    def synchronize(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def blank(self) -> None:
        """Overwrite the whole state with zeros: the target of a restore."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.zero_()

    def digests(self) -> dict[str, str]:
        """A digest of every tensor's bytes, by name."""
        return {
            name: xxhash.xxh3_128_hexdigest(tensor.cpu().contiguous().numpy().tobytes())
            for name, tensor in self.tensors().items()
        }

    def calibrate(self, staging_s: float) -> int:
        """The batch with which forward and backward outlast staging by half."""
        wanted = max(_LEAST_STEP_S, _LONGER_THAN_STAGING * staging_s)
        batch, took = 1, self._forward_backward_s(1)
        while took < wanted and batch < _LARGEST_BATCH:
            batch *= 2
            took = self._forward_backward_s(batch)
        # The power of two before was too little: what is enough lies between the two.
        return max(batch // 2 + 1, round(batch * wanted / took)) if took > wanted else batch

    def _forward_backward_s(self, batch: int) -> float:
        took = []
        for _ in range(_TRIES):
            start = time.monotonic()
            self.forward_backward(batch)
            self.synchronize()
            took.append(time.monotonic() - start)
        return min(took)
