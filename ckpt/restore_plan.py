"""What one rank has to read to restore its state, and what is done with it once all is checked.

Nothing here touches the live state before `RestorePlan.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt import values
from ckpt.differences import Difference
from ckpt.errors import Corrupt, StateError
from ckpt.flatten import put_back
from ckpt.landing import Copy, Piece, land, torch_dtype, whole_pieces
from ckpt.manifest import Manifest, TensorInfo
from ckpt.reader import read_verified
from ckpt.restore_write import write_all
from ckpt.store import Store
from ckpt.tensor_kinds import dtype_name, is_dtensor, local_part

__all__ = ["Like", "RestorePlan", "Target", "fresh_like", "referenced"]

Like = Tensor | torch.device | None
"""Where a new tensor is to lie: beside another one and sharded like it, on a device, or on the CPU."""


class Target(NamedTuple):
    """A tensor to fill from the manifest's tensor `stored`; if it is `live`, only after all is checked."""

    stored: str
    tensor: Tensor
    live: bool


@dataclass(eq=False)
class RestorePlan:
    """What to read for one rank, how state and checkpoint differ, and what to do in the end.

    `same` are pairs of targets that have to turn out equal: tied in this state, but stored twice.
    `unfit` holds the ids of live tensors that the checkpoint's don't fit. `actions` put values and
    fresh tensors into the live state, each with the name of the entry it is for.
    """

    manifest: Manifest
    targets: dict[str, Target] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)
    unfit: set[int] = field(default_factory=set)
    actions: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _trees: dict[str, Any] = field(default_factory=dict)

    def differ(self, kind: str, name: str, detail: str = "") -> None:
        """Put a difference on the list."""
        self.differences.append(Difference(kind, name, detail))

    def stored_name(self, key: str) -> str | None:
        """The manifest's tensor with a key's data: its own, or the one it was tied to when saved."""
        return key if key in self.manifest.tensors else self.manifest.aliases.get(key)

    def stored_keys(self) -> Iterator[str]:
        """All names of stored tensors, those of tied ones included."""
        yield from self.manifest.tensors
        yield from self.manifest.aliases

    def info(self, stored: str) -> TensorInfo:
        """What the manifest says of a stored tensor."""
        return self.manifest.tensors[stored]

    def fill(self, key: str, stored: str, tensor: Tensor, live: bool) -> bool:
        """Ask for a tensor to be filled. False, and a difference, if shape or dtype are others."""
        info, here = self.info(stored), dtype_name(tensor.dtype)
        if info.shape != tuple(tensor.shape):
            self.differ("shape", key, f"{list(info.shape)} in the checkpoint, {list(tensor.shape)} here")
        elif info.dtype != here:
            self.differ("dtype", key, f"{info.dtype} in the checkpoint, {here} here")
        else:
            self.targets[key] = Target(stored, tensor, live)
            return True
        self.unfit.add(id(tensor))
        return False

    def fresh(self, key: str, stored: str, like: Like) -> Tensor:
        """Ask for a new tensor of the stored shape and dtype, placed as `like`; `read` will fill it."""
        info = self.info(stored)
        tensor = fresh_like(like, info.shape, torch_dtype(info.dtype))
        self.targets[key] = Target(stored, tensor, False)
        return tensor

    def has_values(self, entry: str) -> bool:
        """Whether the checkpoint has values under an entry's name."""
        return entry in self.manifest.values

    def tree(self, entry: str) -> Any:
        """The decoded values of an entry, with references in the places of tensors."""
        if entry not in self._trees:
            self._trees[entry] = values.decode(self.manifest.values[entry])
        return self._trees[entry]

    def with_tensors(self, tree: Any, like: Callable[[str], Like]) -> Any:
        """The tree with fresh tensors in the places of its references, each placed as `like(key)`."""
        made: dict[str, Tensor] = {}
        for key in referenced(tree):
            stored = self.stored_name(key)
            if stored is None:
                raise Corrupt(f"{self.manifest.attempt}: its values refer to {key!r}, which is not stored")
            made[key] = self.fresh(key, stored, like(key))
        return put_back(tree, made)

    def read(self, store: Store, threads: int = 4) -> int:
        """Read and check everything; returns the bytes read. Fills what isn't live, touches nothing else.

        Memory: the fresh tensors, as many bytes as the live ones have, and 16 MiB per thread. Raises
        Corrupt or StorageError.
        """
        wants, copies = land(list(self._pieces()))
        files = {entry.name: entry for entry in self.manifest.files}
        nbytes = read_verified(store, self.manifest.attempt, files, wants, threads=threads)
        write_all([copy for copy in copies if not copy.live])
        self._copies = [copy for copy in copies if copy.live]
        return nbytes

    def unequal(self) -> list[Difference]:
        """After `read`: what is tied in this state, but has different values in the checkpoint."""
        return [
            Difference("other", one, f"tied to {two} here, but the checkpoint has other values for it")
            for one, two in self.same
            if not _equal(self.targets[one].tensor, self.targets[two].tensor)
        ]

    def apply(self) -> None:
        """Change the live state, after `read`. Raises StateError naming an entry that refuses its state, or
        if a tensor can't be written.

        Objects that may refuse come first, so that a refusal leaves as much as possible as it was.
        """
        for entry, action in self.actions:
            try:
                action()
            except Exception as error:
                raise StateError(
                    f"{entry!r} did not take its state from {self.manifest.attempt} "
                    f"({type(error).__name__}: {error}); the state may now be mixed: do not train on it"
                ) from error
        try:
            write_all(self._copies)
        except Exception as error:
            raise StateError(
                f"a tensor could not be filled from {self.manifest.attempt} "
                f"({type(error).__name__}: {error}); the state may now be mixed: do not train on it"
            ) from error
        self._copies = []

    def _pieces(self) -> Iterator[Piece]:
        sharded = {key: target for key, target in self.targets.items() if is_dtensor(target.tensor)}
        for key, target in self.targets.items():
            if key not in sharded:
                info = self.info(target.stored)
                yield from whole_pieces(self.manifest, info, target.tensor.detach(), target.live)
        if sharded:
            # Imported when needed: it costs a second, and a state without DTensors needs no planner.
            from ckpt.dcp_reader import sharded_pieces

            yield from sharded_pieces(
                self.manifest,
                {key: target.tensor for key, target in sharded.items()},
                {key: target.stored for key, target in sharded.items()},
                frozenset(key for key, target in sharded.items() if target.live),
            )


def fresh_like(like: Like, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new, unfilled tensor on the device of `like`; sharded and strided like it if the shapes agree."""
    if isinstance(like, Tensor) and tuple(like.shape) == shape:
        return torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
    if isinstance(like, Tensor) and is_dtensor(like):
        return _replicated(like, shape, dtype)
    return torch.empty(shape, dtype=dtype, device=like.device if isinstance(like, Tensor) else like)


def _replicated(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    part = torch.empty(shape, dtype=dtype, device=like.device)
    return DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)


def referenced(tree: Any) -> list[str]:
    """The keys of all tensors that a tree of values refers to."""
    seen = _Keys()
    put_back(tree, seen)
    return list(seen)


class _Keys(Mapping[str, Any]):
    """Stands in for tensors, and remembers which were asked for."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def __getitem__(self, key: str) -> None:
        self._seen[key] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)


def _equal(one: Tensor, two: Tensor) -> bool:
    bits = [local_part(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return torch.equal(bits[0], bits[1])
