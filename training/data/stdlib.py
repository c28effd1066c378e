"""The source text of Python's own standard library, cut into windows of bytes."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.order import sample_rng

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "turtledemo"}


def source_files(root: Path) -> Iterator[Path]:
    """Every library module below ``root``, in an order that depends on names only."""
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if entry.is_dir():
            if entry.name not in SKIPPED and not entry.is_symlink():
                yield from source_files(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def for_validation(name: str, fraction: float) -> bool:
    """Whether a file is held out; decided by its name, so that other files don't move it."""
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return drawn < fraction * 2**32


class Windows:
    """Samples {"tokens": uint8 (context + 1,)} of a text, one for each ``context`` bytes of it.

    With ``jitter`` a window starts up to half a context away, elsewhere in every epoch.
    """

    own_randomness = True

    def __init__(self, text: np.ndarray, context: int, jitter: bool) -> None:
        self._text = text
        self._context = context
        self._jitter = jitter

    def __len__(self) -> int:
        return max(0, (len(self._text) - 1) // self._context)

    def sample(self, index: int, epoch: int, seed: int) -> Mapping[str, Tensor]:
        """Window ``index``."""
        start = index * self._context
        if self._jitter:
            half = self._context // 2
            start += int(sample_rng(seed, epoch, index).integers(-half, half + 1))
            start = min(max(start, 0), len(self._text) - self._context - 1)
        return {"tokens": torch.from_numpy(self._text[start : start + self._context + 1].copy())}


class StdlibText:
    """The library's modules in order of their names, up to ``max_bytes``; whole files are held out.

    Raises ValueError if either split is too short for one window.
    """

    def __init__(
        self,
        context: int = 128,
        max_bytes: int = 8 << 20,
        val_fraction: float = 0.05,
        root: str | None = None,
    ) -> None:
        folder = Path(root or sysconfig.get_path("stdlib"))
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        left = max_bytes
        digest = hashlib.blake2b(digest_size=16)
        for path in source_files(folder):
            if left <= 0:
                break
            name = path.relative_to(folder).as_posix()
            text = path.read_bytes()[:left]
            left -= len(text)
            digest.update(f"{name}\0{len(text)}\0".encode())
            digest.update(text)
            parts[for_validation(name, val_fraction)].append(text)
        self._digest = digest.hexdigest()
        train, val = (np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True))
        self.train = Windows(train, context, jitter=True)
        self.val = Windows(val, context, jitter=False)
        if not len(self.train) or not len(self.val):
            raise ValueError(
                f"{folder} gave {len(train)} bytes to train on and {len(val)} to validate on, "
                f"and a sample takes {context + 1}: raise data.max_bytes or data.val_fraction, "
                "or lower data.context"
            )

    def identity(self) -> dict[str, Any]:
        """The text's digest, and the Python whose library it is."""
        return {"data": "stdlib", "digest": self._digest, "python": platform.python_version()}
