"""One launch on one rank: everything put together from the configuration, trained, and brought to an end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt.checkpoint import Checkpoint
from ckpt.launches import record_end
from ckpt.manager import CheckpointManager
from ckpt.policies import KeepLast
from ckpt.run import open_run
from training import costs, hyper, rng
from training import device as devices
from training.build import build
from training.control import Control
from training.digest import weights_digest
from training.group import Group
from training.loader import Loader
from training.loop import Loop
from training.metrics import Metrics
from training.precision import Precision
from training.quick import spare_the_compiler
from training.spec import FINISHED, SPOOL
from training.state import DataIdentity, Progress
from training.stop import Stop

MANAGER_OPTIONS = (
    "when_busy",
    "max_failed_saves",
    "slots",
    "threads",
    "digest",
    "confirm",
    "bandwidth_limit",
    "posthumous_s",
)


class Session:
    """``begin`` makes and restores, ``train`` trains and ends well; ``failed`` records an end that is not.

    ``progress`` tells how far it came at any time.
    """

    def __init__(self, job: Mapping[str, Any], group: Group, control: Control, stop: Stop) -> None:
        self._job = job
        self._config: Mapping[str, Any] = job["config"]
        self._trainer: Mapping[str, Any] = self._config["trainer"]
        self._group = group
        self._control = control
        self._stop = stop
        self._manager: CheckpointManager | None = None
        self._loader: Loader | None = None
        self._loop: Loop | None = None
        self._metrics = Metrics(self._spool())
        self.progress = Progress()

    @property
    def launch(self) -> int | None:
        """The launch's number, once the run is open."""
        return None if self._manager is None else self._manager.launch.number

    def begin(self) -> None:
        """Build everything, open the run as its next launch, and restore."""
        spare_the_compiler()
        config, trainer, group = self._config, self._trainer, self._group
        device = devices.choose(trainer, group)
        devices.prepare(trainer, group)
        strategy = build(config["strategy"])
        strategy.setup(group, device)
        seed = int(config["seed"])
        data = build(config["data"])
        self._loader = Loader(
            data.train,
            seed,
            trainer["batch_size"],
            trainer["accumulate"],
            trainer["workers"],
            group.rank,
            group.world_size,
            close_fds=[self._control.fileno()],
        )
        rng.seed_all(seed)
        model = strategy.wrap(build(config["model"]))
        optimizer = build(config["optim"], model)
        hyper.remember_base(optimizer)
        configured = hyper.options(optimizer)
        precision = Precision(trainer["precision"], device, self.say)
        rng.seed_rank(seed, group.rank)
        self._manager = manager = self._open(
            {
                "model": model,
                "optim": optimizer,
                "progress": self.progress,
                "precision": precision,
                "rng": rng.RngState(),
                "data": DataIdentity(data.identity(), self.say),
            },
            strategy.group,
        )
        self._stop.on_request = manager.request_stop
        self._announce(model, device)
        began = time.monotonic()
        self._parent = manager.restore(self._job["which"])
        if self._parent is not None:
            self._resumed(self._parent, optimizer, configured, time.monotonic() - began)
        self._loop = Loop(
            trainer=trainer,
            model=model,
            optimizer=optimizer,
            schedule=build(config["schedule"]),
            strategy=strategy,
            precision=precision,
            data=data,
            loader=self._loader,
            progress=self.progress,
            manager=manager,
            control=self._control,
            metrics=self._metrics,
            stop=self._stop,
            device=device,
        )

    def train(self) -> None:
        """Train to the end or to a stop, commit the last step, and record how it ended."""
        assert self._manager is not None
        assert self._loop is not None
        first = self.progress.step
        finished = self._loop.run()
        step = self.progress.step
        grace = None if finished else self._stop.left(float(self._trainer["stop_grace_s"]))
        self._manager.close(final_step=step, save=step > first, timeout=grace, end=False)
        self._metrics.close()
        self.ended(FINISHED if finished else self._stop.outcome, None if finished else self._stop.reason)

    def ended(self, outcome: str, cause: str | None) -> None:
        """Record the verdict in the run and tell the flow."""
        fields: dict[str, Any] = {"outcome": outcome, "cause": cause, "step": self.progress.step}
        if self._manager is not None:
            self._manager.close(save=False, end=False)
            if self._group.rank == 0:
                record_end(self._manager.run, self._manager.launch, outcome, cause, self.progress.step)
            fields["stats"] = costs.told(self._manager.stats)
        if self._loop is not None:
            fields["weights_digest"] = weights_digest(self._loop.model.state_dict())
        self._control.event("end", **fields)
        self.release()

    def failed(self, cause: str) -> None:
        """Record a failure; whichever rank failed first is heard, for the record is made only once."""
        if self._manager is not None:
            record_end(self._manager.run, self._manager.launch, "failed", cause, self.progress.step)
        self.release()

    def release(self) -> None:
        """End the loader's workers."""
        if self._loader is not None:
            self._loader.close()

    def say(self, text: str) -> None:
        """A line for whoever watches, and for the log."""
        print(text, flush=True)
        self._control.event("note", text=text)

    def _open(self, state: dict[str, Any], process_group: Any) -> CheckpointManager:
        options = self._config["checkpoint"]
        return CheckpointManager(
            open_run(self._job["run_uri"], takeover=self._job["takeover"]),
            state,
            save=build(options["save"]),
            keep=build(options["keep"]) if options.get("keep") else KeepLast(None),
            process_group=process_group,
            config=self._job["saved_config"],
            overrides=self._job["overrides"],
            say=self.say,
            on_event=self._on_save,
            **{name: options[name] for name in MANAGER_OPTIONS if name in options},
        )

    def _on_save(self, event: Mapping[str, Any]) -> None:
        """Called in a background thread, too."""
        more = {}
        if event["state"] == "committed" and self._manager is not None:
            stats = self._manager.stats
            more["stats"] = costs.told(stats)
            self._metrics.put(event["step"], costs.metrics(event, stats, self._group.world_size))
        self._control.event("save", **event, **more)

    def _announce(self, model: torch.nn.Module, device: torch.device) -> None:
        self._control.event(
            "start",
            launch=self.launch,
            params=sum(parameter.numel() for parameter in model.parameters()),
            max_steps=self._trainer["max_steps"],
            device=str(device),
            threads=torch.get_num_threads(),
            world_size=self._group.world_size,
        )

    def _resumed(
        self,
        parent: Checkpoint,
        optimizer: torch.optim.Optimizer,
        configured: list[dict[str, Any]],
        seconds: float,
    ) -> None:
        saved = (parent.manifest.config or {}).get("optim")
        for line in hyper.apply_changes(optimizer, configured, saved, self._config["optim"]):
            self.say(line)
        self._control.event("restored", step=parent.step, attempt=parent.attempt, seconds=seconds)

    def _spool(self) -> Path | None:
        tracking = self._config.get("tracking") or {}
        folder = tracking.get("spool") or os.environ.get(SPOOL)
        return Path(folder) if folder and tracking.get("uri") and self._group.rank == 0 else None
