"""Names of a module's tensors without the wrappers around it, at any depth."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# `module` is a common name for a user's own child too: only these parents make it a wrapper's.
_WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "AveragedModel",
    "DeepSpeedEngine",
}


def clean_paths(root: nn.Module) -> dict[str, str]:
    """The path of every module below `root`, as `named_modules` spells it -> the path without wrappers."""
    paths = {"": ""}

    def walk(module: nn.Module, raw: str, clean: str) -> None:
        for name, child in module._modules.items():
            if child is None:
                continue
            raw_child = f"{raw}.{name}" if raw else name
            if _is_wrapper(module, name):
                clean_child = clean
            else:
                clean_child = f"{clean}.{name}" if clean else name
            paths[raw_child] = clean_child
            walk(child, raw_child, clean_child)

    walk(root, "", "")
    return paths


def clean_key(raw: str, paths: Mapping[str, str]) -> str:
    """A `state_dict` key without wrapper names; `paths` comes from `clean_paths`."""
    head = raw
    while head:
        head = head.rpartition(".")[0]
        if head in paths:
            tail = raw[len(head) + 1 :] if head else raw
            if "." in tail:
                tail = ".".join(part for part in tail.split(".") if part not in _WRAPPED)
            return f"{paths[head]}.{tail}" if paths[head] else tail
    return raw


def _is_wrapper(parent: nn.Module, name: str) -> bool:
    if name in _WRAPPED:
        return True
    return name == "module" and any(base.__name__ in _WRAPPERS for base in type(parent).__mro__)
