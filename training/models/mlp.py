"""A perceptron with one hidden layer, for rows of numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Module):
    """Classifies float32 rows of ``inputs`` numbers into ``outputs`` classes."""

    def __init__(self, inputs: int = 64, hidden: int = 128, outputs: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (batch, outputs) of rows (batch, inputs)."""
        return self.layers(inputs)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy; ``batch`` holds "inputs" and int64 "targets" (batch,)."""
        return functional.cross_entropy(self(batch["inputs"]).float(), batch["targets"])
