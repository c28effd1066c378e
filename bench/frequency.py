"""What training loses if it saves every so many steps, for good."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench import quiet
from bench.loop import Loop
from bench.places import Place

_FEWEST_SAVES, _FEWEST_STEPS = 3, 20


def lost_share(loop: Loop, every: int, steps: int, folder: Place) -> float:
    """The share of training time lost (0.1: a tenth more is needed) with a save every `every` steps.

    One save is in flight at a time: a save that is due earlier holds training up until the one before is
    durable; then the one before that is deleted, in the background. Compared with as many steps before and
    after without saves. Raises what makes a save fail.
    """
    before = loop.run(steps)
    spent = 0.0
    with ThreadPoolExecutor(1) as remover:
        older: int | None = None
        removals = []
        for _ in range(0, steps, every):
            spent += loop.run(every, save=True)
            spent += loop.wait_durable()
            if older is not None:
                removals.append(remover.submit(loop.engine.discard, older))
            older = loop.saved_step
        for removal in removals:
            removal.result()
    quiet.settle(loop, folder)
    after = loop.run(steps)
    return 2 * spent / (before + after) - 1


def steps_for(every: int, quick: bool) -> int:
    """Over how many steps it is measured: a multiple of `every`, with three saves at least unless `quick`."""
    least = every if quick else max(_FEWEST_SAVES * every, _FEWEST_STEPS)
    return -(-least // every) * every
