"""One engine, or the limits, measured in this process and told to the parent as lines of JSON.

python -m bench.child JOB SPEC FD
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from bench import frequency, gil, limits, paired, quiet, restoring
from bench.engines import ALWAYS, FLOOR, NULL, make
from bench.engines.base import Absent, Engine
from bench.loop import Loop
from bench.places import Place, place_of
from bench.spec import FAILING, LIMITS, Spec
from bench.workload import Workload

Tell = Callable[..., None]


def measure_engine(key: str, spec: Spec, tell: Tell) -> dict[str, Any]:
    """All figures of one engine, by phase. Raises Absent, or whatever the engine raises."""
    engine = make(key)
    folder = place_of(spec)
    tell(phase="prepare", title=engine.title, note=engine.note)
    loop = _begin(engine, spec)

    tell(phase="first save")
    loop.run(spec.window, save=True)
    loop.wait_durable()
    figures: dict[str, Any] = {
        "title": engine.title,
        "note": engine.note,
        "first": {"stall_s": loop.stall_s, "join_s": loop.join_s},
        "restore": None,
    }
    quiet.tidy(engine, loop.saved_step, folder)

    tell(phase=f"{spec.pairs} pairs of {spec.window} steps")
    figures["costs"] = paired.measure(loop, spec.pairs, spec.window, folder).plain()
    if spec.windows_only:
        engine.close()
        return figures
    engine.keep_newest()

    for every in spec.every:
        tell(phase=f"a save every {every} steps")
        share = frequency.lost_share(loop, every, frequency.steps_for(every, spec.quick), folder)
        figures.setdefault("every", {})[str(every)] = share

    if key != NULL:
        tell(phase="interpreter lock")
        figures["gil_s"] = gil.measure(loop, spec.repeats, folder)
    if spec.device == "cuda":
        from bench import busy

        tell(phase="device")
        figures["device_busy"] = busy.measure(loop, spec.repeats, spec.window, folder)
    if key != FLOOR:
        for number in range(spec.memory_saves):
            tell(phase="memory", save=number)
            loop.save(spec.window)
            loop.wait_durable()
            quiet.tidy(engine, loop.saved_step, folder)
        tell(phase="memory is read")
        loop.run(1)  # it has to be there while it is
    if key not in ALWAYS:
        tell(phase="restore")
        figures["restore"] = _restore(loop, engine, spec, folder)
    engine.close()
    return figures


def _begin(engine: Engine, spec: Spec) -> Loop:
    work = Workload(spec.size, spec.tensors, spec.device)
    engine.prepare(work, place_of(spec))
    loop = Loop(work, engine, spec.batch)
    loop.run(spec.window)
    return loop


def _restore(loop: Loop, engine: Engine, spec: Spec, folder: Place) -> dict[str, Any]:
    # The state moves in the optimizer's step only: what is there before it is what is saved.
    engine.save(loop.step)
    saved = loop.work.digests()
    step = loop.step
    engine.before_step()
    engine.wait_durable()
    target = Workload(spec.size, spec.tensors, spec.device)
    return restoring.measure(engine, step, saved, target, folder, spec.repeats).plain()


def measure_failing(spec: Spec, tell: Tell) -> dict[str, Any]:
    """Memory while the environment makes every save fail. Raises RuntimeError if one does not."""
    from bench.engines.engine import OwnEngine

    tell(phase="every save fails")
    engine = OwnEngine(max_failed_saves=spec.memory_saves + 1)
    loop = _begin(engine, spec)
    for number in range(spec.memory_saves):
        tell(phase="memory", save=number)
        loop.run(spec.window, save=True)
        engine.wait_failed(number + 1)
    tell(phase="memory is read")
    loop.run(1)
    engine.close()
    return {}


def measure_limits(spec: Spec, tell: Tell) -> dict[str, Any]:
    """What the hardware allows."""
    tell(phase="measure again" if spec.window else "calibrate and measure")
    work = Workload(spec.size, spec.tensors, spec.device)
    return limits.measure(spec, work, place_of(spec)).plain()


def main(job: str, spec: Spec, fd: int) -> int:
    """Measure and tell; the exit code."""
    with os.fdopen(fd, "w", encoding="utf-8") as pipe:

        def tell(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        torch.set_num_threads(spec.threads)
        if spec.tensors > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            # Else the engines that pass tensors to a process of theirs need an open file for each.
            torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            if job == LIMITS:
                tell(figures=measure_limits(spec, tell))
            elif job == FAILING:
                tell(figures=measure_failing(spec, tell))
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
