"""Start-up without what nobody asked for.

The first optimizer makes torch import its compiler, which takes as long as importing torch itself, only to
mark a few methods as "never compile" and to break a graph that nobody traces. Here these methods do the same
without it, as long as nothing else has imported the compiler; from then on they are torch's own again. With a
torch that is made differently, nothing is touched and only the time is lost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER = "torch._dynamo"


def spare_the_compiler() -> None:
    """Keep ``torch.optim`` from importing the compiler in this process. Harmless to call twice."""
    for kind in [torch.optim.Optimizer, *vars(torch.optim).values()]:
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            for name, method in list(vars(kind).items()):
                code = getattr(method, "__code__", None)
                inner = getattr(method, "__wrapped__", None)
                if code is None or inner is None:
                    continue
                if code.co_filename.endswith("torch/_compile.py"):
                    setattr(kind, name, _uncompiled(method, inner))
                elif code.co_name == "_use_grad":
                    setattr(kind, name, _without_grad(method, inner))


def _uncompiled(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (method if COMPILER in sys.modules else inner)(*args, **kwargs)

    return run


def _without_grad(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def run(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return method(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *args, **kwargs)

    return run
