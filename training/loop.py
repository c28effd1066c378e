"""The training loop: batches in, updates and saves out, and a clean way to stop at any moment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckpt.manager import CheckpointManager
from training import hyper
from training.control import Control
from training.data.protocol import Dataset
from training.evaluation import validate
from training.loader import Loader
from training.metrics import Metrics
from training.precision import Precision
from training.schedules import Schedule
from training.state import Progress
from training.stop import Stop, StopRequested
from training.strategies.base import Strategy
from training.workers import Batch


@dataclass
class Loop:
    """Everything that a run consists of on this rank; ``run`` trains until the end or a stop."""

    trainer: Mapping[str, Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    strategy: Strategy
    precision: Precision
    data: Dataset
    loader: Loader
    progress: Progress
    manager: CheckpointManager
    control: Control
    metrics: Metrics
    stop: Stop
    device: torch.device

    def run(self) -> bool:
        """Train up to ``max_steps`` updates, saving by policy; False if a stop came first."""
        self.model.train()
        self._reported = (time.monotonic(), self.progress.samples)
        first = self.progress.step
        self._evaluate_if_due()
        while self.progress.step < self.trainer["max_steps"]:
            if self.manager.stop_agreed(self.progress.step):
                return False
            batches = self._batches()
            if batches is None:
                continue
            values = self._update(batches)
            if values is None:
                continue
            step = self.progress.step
            if (
                step == first + 1
                or step % self.trainer["log_every"] == 0
                or step == self.trainer["max_steps"]
            ):
                self._report(step, values)
            values.update(self._evaluate_if_due())
            self.manager.step(step, metrics=values)
        return True

    def _batches(self) -> list[Batch] | None:
        """The next update's micro-batches; None if a stop came while waiting for them."""
        if self.strategy.group is not None:
            # Ranks stop at a step they agree on, so none may leave the wait for a batch by itself.
            return self.loader.next(self.progress.samples)
        try:
            with self.stop.interruptible():
                return self.loader.next(self.progress.samples)
        except StopRequested:
            return None

    def _update(self, batches: list[Batch]) -> dict[str, float] | None:
        """One optimizer update from its micro-batches; None if the gradient scaler skipped it."""
        lr = hyper.apply_schedule(self.optimizer, self.schedule, self.progress.step)
        total = torch.zeros((), device=self.device)
        for place, batch in enumerate(batches):
            self.strategy.sync(self.model, last=place == len(batches) - 1)
            on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
            with self.precision.autocast():
                loss: Tensor = self.model.loss(on_device) / len(batches)  # type: ignore[operator]
            self.precision.backward(loss)
            total += loss.detach()
        values = {"lr": lr}
        if self.trainer.get("clip_norm"):
            self.precision.unscale(self.optimizer)
            values["grad_norm"] = self.strategy.clip(self.model, float(self.trainer["clip_norm"])).item()
        updated = self.precision.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.samples += self.trainer["batch_size"]
        if not updated:
            return None
        self.progress.step += 1
        values["loss"] = self.strategy.mean(total).item()
        return values

    def _evaluate_if_due(self) -> dict[str, float]:
        """Validate at multiples of ``eval_every``, also one that an earlier launch was stopped in."""
        every, step = self.trainer.get("eval_every") or 0, self.progress.step
        if not every or not step or step % every or self.progress.evaluated == step:
            return {}
        result = validate(
            self.model,
            self.data.val,
            self.trainer["batch_size"],
            self.trainer.get("eval_samples"),
            self.device,
            lambda: self.stop.requested,
        )
        if result is None:
            return {}
        self.progress.evaluated = step
        self.control.event("eval", step=step, val_loss=result.loss, samples=result.samples)
        self.metrics.put(step, {"val_loss": result.loss})
        return {"val_loss": result.loss}

    def _report(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        before, samples = self._reported
        rate = (self.progress.samples - samples) / max(now - before, 1e-9)
        self._reported = (now, self.progress.samples)
        self.control.event("step", step=step, **values, samples_per_s=rate)
        self.metrics.put(step, values)
