"""Predictions of a committed checkpoint, for whoever serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from training.weights import load_model

GENERATED = 64  # bytes that follow a prompt


class Predictor:
    """Predicts with a model: text for a model that has ``generate``, classes for one of rows of numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """One result per input.

        Prompts (str) give ``{"text", "loss"}``: the likeliest continuation, and the mean loss of the prompt's
        own bytes in nats (None for a prompt of less than two bytes). Rows (numbers, as many as the model
        takes) give their class (int). Raises TypeError for inputs that are neither.
        """
        if all(isinstance(item, str) for item in inputs):
            return [self._continue(prompt) for prompt in inputs]
        if any(isinstance(item, str) for item in inputs):
            raise TypeError("predict takes prompts (str) or rows of numbers, not both at once")
        with torch.no_grad():
            return self.model(torch.tensor(inputs, dtype=torch.float32)).argmax(-1).tolist()

    def _continue(self, prompt: str) -> dict[str, Any]:
        tokens = torch.tensor(list(prompt.encode() or b"\n"))
        context: int = self.model.context  # type: ignore[assignment]
        loss = None
        if len(tokens) > 1:
            with torch.no_grad():
                loss = self.model.loss({"tokens": tokens[None, -context - 1 :]}).item()  # type: ignore[operator]
        following = self.model.generate(tokens, GENERATED)  # type: ignore[operator]
        return {"text": bytes(following.tolist()).decode(errors="replace"), "loss": loss}


def load(checkpoint: str, config: Mapping[str, Any] | None = None) -> Predictor:
    """A predictor with a checkpoint's weights; the model is built as the checkpoint's own config says."""
    if config is None:
        from ckpt.verification import as_checkpoint

        config = as_checkpoint(checkpoint).manifest.config
    if not config or "model" not in config:
        raise ValueError(f"{checkpoint} holds no configuration: give the one its model was built from")
    return Predictor(load_model(checkpoint, config))
