"""What the loop asks of a dataset. Bring your own by a ``_target_`` in ``conf/data``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Split(Protocol):
    """A map-style split.

    ``sample`` returns a dict of tensors, the same shapes and dtypes for every index, and depends on nothing
    but its arguments: global random state (Python, NumPy, torch) is seeded from them before each call, unless
    ``own_randomness = True`` says that the split never uses it.
    """

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int, seed: int) -> Mapping[str, Tensor]:
        """Sample ``index`` as it looks in this epoch of a run with this seed."""
        ...


class Dataset(Protocol):
    """A training and a validation split, and plain values that tell this data from any other."""

    train: Split
    val: Split

    def identity(self) -> dict[str, Any]:
        """What must be equal for a resumed run to see the same samples."""
        ...
