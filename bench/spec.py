"""What one measured process is asked to do; it travels to that process as JSON."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import asdict, dataclass, replace

# What the checkpoint engine uses by default, and therefore what the raw limits are measured with.
WRITE_THREADS = 2
READ_THREADS = 4
# The jobs that are no engine: the raw limits, and the own engine while every save fails.
LIMITS, FAILING = "limits", "failing"
# The own engine in a folder, beside what is measured in a bucket.
FOLDER = "folder"
# What such a job finds in its environment: as if the disk or bucket were full whenever a shard is written.
_FULL = {"match": "writer:(pwrite|upload):", "do": "raise", "errno": errno.ENOSPC}
ENVIRONMENT_OF = {FAILING: {"CKPT_FAULTS": json.dumps([_FULL])}}

_BYTES = 4
_COPIES = 3  # the parameters and AdamW's two moments
_PREFERRED = 4 << 20
_FEWEST_LAYERS = 4


@dataclass(frozen=True)
class Spec:
    """Sizes in bytes. `batch` and `window` (steps) are 0 until the limits have been measured.

    windows_only: what the paired windows tell is enough. disk: a folder on this machine, for what a run in a
    bucket needs there. store_disk: where the bucket's data are, if it is this machine's.
    """

    size: int
    tensors: int
    threads: int
    device: str
    pairs: int
    every: tuple[int, ...]
    quick: bool
    folder: str
    disk: str = ""
    store_disk: str = ""
    batch: int = 0
    window: int = 0
    windows_only: bool = False

    @property
    def repeats(self) -> int:
        """How often a restore and what threads hold the interpreter lock for are measured."""
        return 1 if self.quick else 3

    @property
    def raw_repeats(self) -> int:
        """How often a raw limit is measured before the engines are, and again after them."""
        return 1 if self.quick else 3

    @property
    def memory_saves(self) -> int:
        """Saves over which memory is watched."""
        return 4 if self.quick else 12

    def settled(self, batch: int, window: int) -> Spec:
        """The same with the step that the limits' process calibrated."""
        return replace(self, batch=batch, window=window)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec in `text`."""
        plain = json.loads(text)
        return cls(**{**plain, "every": tuple(plain["every"])})


def default_tensors(size: int) -> int:
    """How many tensors a state of `size` bytes has where nothing is said: of 4 MiB each, 12 at least."""
    return _COPIES * max(_FEWEST_LAYERS, round(size / _COPIES / _PREFERRED))


def layers_of(tensors: int) -> int:
    """How many layers have that many tensors, the optimizer's among them."""
    return max(1, tensors // _COPIES)


def layer_width(size: int, tensors: int) -> int:
    """The side of the square layers; below 1 if `size` bytes can't hold that many tensors."""
    return math.isqrt(size // (_COPIES * _BYTES * layers_of(tensors)))
