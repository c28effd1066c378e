"""A process that evaluates one checkpoint: ``python -m training.evaluate``, its job as JSON on stdin.

Prints ``{"val_loss", "samples", "step"}``. It opens nothing for writing and ends when its starter does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from training import device as devices
from training.build import build
from training.evaluation import validate
from training.group import Group
from training.weights import load_model


def evaluate(config: Mapping[str, Any], checkpoint: str, samples: int | None) -> dict[str, Any]:
    """The mean validation loss of a checkpoint over ``samples`` samples (None: all), as in training."""
    from ckpt.verification import as_checkpoint

    trainer = config["trainer"]
    group = Group(0, 1, 0, 1, 0)
    device = devices.choose(trainer, group)
    devices.prepare(trainer, group)
    model = load_model(checkpoint, config).to(device)
    result = validate(model, build(config["data"]).val, trainer["batch_size"], samples, device)
    assert result is not None
    return {"val_loss": result.loss, "samples": result.samples, "step": as_checkpoint(checkpoint).step}


def main() -> None:
    """Read the job, print the result."""
    job = json.loads(sys.stdin.readline())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a model or dataset prints is no part of the answer

    def end_with_starter() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=end_with_starter, daemon=True).start()
    json.dump(evaluate(job["config"], job["checkpoint"], job["samples"]), answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
