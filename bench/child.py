"""One engine, or the limits, measured in this process and told to the parent as lines of JSON.

python -m bench.child JOB SPEC FD
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import frequency, limits, paired, restoring
from bench.engines import NULL, make
from bench.engines.base import Absent, Engine
from bench.loop import Loop
from bench.spec import LIMITS, Spec
from bench.workload import Workload

Tell = Callable[..., None]


def measure_engine(key: str, spec: Spec, tell: Tell) -> dict[str, Any]:
    """All figures of one engine, by phase. Raises Absent, or whatever the engine raises."""
    engine = make(key)
    folder = Path(spec.folder)
    tell(phase="prepare", title=engine.title, note=engine.note)
    work = Workload(spec.size, spec.tensors, spec.device)
    engine.prepare(work, folder)
    loop = Loop(work, engine, spec.batch)
    loop.run(spec.window)

    tell(phase="first save")
    loop.run(spec.window, save=True)
    loop.wait_durable()
    figures: dict[str, Any] = {
        "title": engine.title,
        "note": engine.note,
        "state_bytes": work.nbytes,
        "first": {"stall_s": loop.stall_s, "join_s": loop.join_s},
    }
    engine.discard(loop.saved_step)

    tell(phase=f"{spec.pairs} pairs of {spec.window} steps")
    figures["costs"] = paired.measure(loop, spec.pairs, spec.window).plain()

    for every in spec.every:
        tell(phase=f"a save every {every} steps")
        share = frequency.lost_share(loop, every, frequency.steps_for(every, spec.quick))
        figures.setdefault("every", {})[str(every)] = share

    for number in range(spec.memory_saves):
        tell(phase="memory", save=number)
        loop.run(spec.window, save=True)
        loop.wait_durable()
        engine.discard(loop.saved_step)

    figures["restore"] = None
    if key != NULL:
        tell(phase="restore")
        figures["restore"] = _restore(loop, engine, spec, folder)
    engine.close()
    return figures


def _restore(loop: Loop, engine: Engine, spec: Spec, folder: Path) -> dict[str, Any]:
    # The state moves in the optimizer's step only: what is there before it is what is saved.
    engine.save(loop.step)
    saved = loop.work.digests()
    step = loop.step
    engine.before_step()
    engine.wait_durable()
    target = Workload(spec.size, spec.tensors, spec.device)
    return restoring.measure(engine, step, saved, target, folder, spec.repeats).plain()


def measure_limits(spec: Spec, tell: Tell) -> dict[str, Any]:
    """What the hardware allows."""
    tell(phase="calibrate and measure")
    work = Workload(spec.size, spec.tensors, spec.device)
    return limits.measure(spec, work, Path(spec.folder)).plain()


def main(job: str, spec: Spec, fd: int) -> int:
    """Measure and tell; the exit code."""
    with os.fdopen(fd, "w", encoding="utf-8") as pipe:

        def tell(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        torch.set_num_threads(spec.threads)
        try:
            if job == LIMITS:
                tell(figures=measure_limits(spec, tell))
            else:
                tell(figures=measure_engine(job, spec, tell))
        except Absent as reason:
            tell(absent=str(reason))
        except BaseException as error:  # torch's CheckpointException is no Exception
            tell(failed=f"{type(error).__name__}: {error}")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Spec.from_json(sys.argv[2]), int(sys.argv[3])))
