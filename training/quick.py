"""Start-up without what nobody asked for.

Building an optimizer makes torch import its compiler, only to mark a few methods as "never compile"; that
takes as long as importing torch itself. The mark is set beforehand instead. Nothing changes once the
compiler is there, and with a torch that marks differently this only loses the time it would save.
"""

from __future__ import annotations

import sys

import torch


def spare_the_compiler() -> None:
    """Keep ``torch.optim`` from importing ``torch._dynamo``, unless something has imported it already."""
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename.endswith("_compile.py"):
            inner = method.__wrapped__
            if getattr(inner, "__dynamo_disable", None) is None:
                setattr(inner, "__dynamo_disable", inner)
