"""Sees whether a structure still consists of the same objects, without walking it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from operator import getitem, is_
from typing import Any


@dataclass(eq=False)
class Watch:
    """What a structure consists of: objects where they were found, and lengths."""

    holders: list[Any] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    sized: list[Sized] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, holder: Any, name: Any, thing: Any) -> None:
        """Count the structure as changed when `holder[name]` is no longer `thing`."""
        self.holders.append(holder)
        self.names.append(name)
        self.objects.append(thing)

    def add_size(self, thing: Sized) -> None:
        """Count the structure as changed when the length of `thing` changes."""
        self.sized.append(thing)
        self.sizes.append(len(thing))

    def same(self) -> bool:
        """Whether nothing has changed; a lookup per object."""
        try:
            now = map(getitem, self.holders, self.names)
            return all(map(is_, now, self.objects)) and list(map(len, self.sized)) == self.sizes
        except (KeyError, IndexError):
            return False
