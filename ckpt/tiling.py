"""Whether boxes cover a tensor exactly: every element once."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, one number per dimension each."""


def gap_or_overlap(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with the boxes, all inside `shape`, as the end of a sentence; None if nothing is."""
    solid = [box for box in boxes if math.prod(box[1])]
    covered, total = sum(math.prod(box[1]) for box in solid), math.prod(shape)
    # Boxes inside the tensor whose volumes add up to its own leave a gap exactly if two of them overlap.
    if covered < total:
        return f"cover only {covered} of its {total} elements"
    if covered > total or _any_overlap(solid):
        return "overlap"
    return None


def _any_overlap(boxes: Sequence[Box]) -> bool:
    if len(boxes) < 2:
        return False
    dims = len(boxes[0][0])
    # Sweeping along the dimension with the most different offsets leaves few boxes side by side at each
    # place.
    sweep = max(range(dims), key=lambda d: len({box[0][d] for box in boxes}), default=None)
    if sweep is None:
        return True
    active: list[Box] = []
    for box in sorted(boxes, key=lambda item: item[0][sweep]):
        start = box[0][sweep]
        active = [other for other in active if other[0][sweep] + other[1][sweep] > start]
        if any(_overlap(box, other) for other in active):
            return True
        active.append(box)
    return False


def _overlap(one: Box, two: Box) -> bool:
    (a, n), (b, m) = one, two
    return all(a[d] < b[d] + m[d] and b[d] < a[d] + n[d] for d in range(len(a)))
