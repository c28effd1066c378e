"""What training loses if it saves every so many steps, for good."""

from __future__ import annotations

from bench.loop import Loop


def lost_share(loop: Loop, every: int, steps: int) -> float:
    """The share of training time lost (0.1: a tenth more is needed) with a save every `every` steps.

    One save is in flight at a time: a save that is due earlier holds training up until the one before is
    durable. Compared with as many steps before and after without saves. Raises what makes a save fail.
    """
    before = loop.run(steps)
    spent = 0.0
    for number in range(0, steps, every):
        spent += loop.wait_durable() if number else 0.0
        spent += loop.run(min(every, steps - number), save=True)
    loop.wait_durable()
    after = loop.run(steps)
    return 2 * spent / (before + after) - 1


def steps_for(every: int, quick: bool) -> int:
    """Over how many steps it is measured: a multiple of `every`, with two saves at least unless `quick`."""
    least = every if quick else max(2 * every, 20)
    return -(-least // every) * every
