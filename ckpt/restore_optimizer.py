"""Restore an optimizer by assigning its state, never by its `load_state_dict`, which casts.

The checkpoint's values win over those of the live param groups, except for the options that say how a step
is computed on this device (`IMPLEMENTATION`): those stay as this process set them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt.restore_plan import Like, RestorePlan, referenced
from ckpt.restore_write import write

__all__ = ["IMPLEMENTATION", "match_optimizer"]

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_OWN = IMPLEMENTATION | {"params", "param_names"}


@dataclass(eq=False)
class _Param:
    """A live parameter (or another key of the optimizer's state), its name here and in the checkpoint."""

    tensor: Any
    name: str
    saved: str | None
    group: dict[str, Any]
    slots: Any = field(default_factory=dict)


def match_optimizer(
    plan: RestorePlan,
    prefix: str,
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    modules: Sequence[str],
) -> set[str]:
    """Plan the restoring of the optimizer stored as `prefix`; returns the stored tensors' keys it knows.

    `names` are its parameters' names per group, `modules` the stored names of the module entries. Slots
    that the live optimizer has are filled in place. Others are made on the parameter's device and sharded
    like it; `step` and other scalars lie where the optimizer's own code would put them.
    """
    known = {key for key in plan.stored_keys() if key.startswith(f"{prefix}.")}
    if not plan.has_values(prefix) or not plan.has_values(f"{prefix}/params"):
        plan.differ("missing", prefix, "the checkpoint has no optimizer of this name")
        return known
    tree, saved_groups = plan.tree(prefix), plan.tree(f"{prefix}/params")
    saved_group = {name: i for i, group in enumerate(saved_groups) for name in group}
    params = [
        _Param(tensor, name, _saved_name(plan, name, saved_group, modules), group)
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
        for tensor, name in zip(group["params"], group_names, strict=True)
    ]
    _compare_members(plan, prefix, params, names, saved_group)
    _compare_options(plan, prefix, optimizer, tree["param_groups"])
    slots = _stored_slots(plan, prefix, tree, saved_group)
    strings = (slots.keys() | tree["state"].keys()) - saved_group.keys()
    params += [_Param(name, name, name, {}) for name in sorted(strings)]
    params = [p for p in params if p.saved is not None and id(p.tensor) not in plan.unfit]
    shared: dict[str, Tensor] = {}
    for param in params:
        _plan_slots(plan, prefix, optimizer, param, slots.get(param.saved or "", {}), tree["state"], shared)
    groups = _plan_options(plan, optimizer, tree["param_groups"])
    plan.actions.append((prefix, lambda: _assign(optimizer, params, groups)))
    return known


def _saved_name(plan: RestorePlan, name: str, saved: dict[str, int], modules: Sequence[str]) -> str | None:
    """A parameter's name in the checkpoint: its own, or that of the one it was tied to when saved."""
    if name in saved:
        return name
    for prefix in ("", *(f"{module}." for module in modules)):
        tied = plan.manifest.aliases.get(prefix + name)
        if tied is not None and tied.removeprefix(prefix) in saved:
            return tied.removeprefix(prefix)
    return None


def _compare_members(
    plan: RestorePlan,
    prefix: str,
    params: Sequence[_Param],
    names: Sequence[Sequence[str]],
    saved_group: dict[str, int],
) -> None:
    group_of = {name: i for i, group in enumerate(names) for name in group}
    for param in params:
        if param.saved is None:
            plan.differ("missing", f"{prefix}.params.{param.name}", "the optimizer had no such parameter")
        elif saved_group[param.saved] != group_of[param.name]:
            there, here = saved_group[param.saved], group_of[param.name]
            detail = f"in param group {there} in the checkpoint, in group {here} here"
            plan.differ("other", f"{prefix}.params.{param.name}", detail)
    for name in saved_group.keys() - {param.saved for param in params}:
        plan.differ("unexpected", f"{prefix}.params.{name}", "the optimizer here has no such parameter")


def _compare_options(
    plan: RestorePlan, prefix: str, optimizer: Optimizer, saved: Sequence[dict[str, Any]]
) -> None:
    if len(saved) != len(optimizer.param_groups):
        detail = f"{len(saved)} groups in the checkpoint, {len(optimizer.param_groups)} here"
        plan.differ("other", f"{prefix}.param_groups", detail)
    for i, (group, options) in enumerate(zip(optimizer.param_groups, saved, strict=False)):
        where = f"{prefix}.param_groups[{i}]"
        for option in group.keys() - options.keys() - _OWN:
            plan.differ("missing", f"{where}.{option}")
        for option in options.keys() - group.keys() - _OWN:
            plan.differ("unexpected", f"{where}.{option}")
        for option in (group.keys() & options.keys()) - _OWN:
            here, there = isinstance(group[option], Tensor), bool(referenced(options[option]))
            if here != there:
                detail = f"{_kind(there)} in the checkpoint, {_kind(here)} here"
                plan.differ("other", f"{where}.{option}", detail)


def _kind(is_tensor: bool) -> str:
    return "a tensor" if is_tensor else "a plain value"


def _stored_slots(
    plan: RestorePlan, prefix: str, tree: dict[str, Any], saved: dict[str, int]
) -> dict[str, dict[str, str]]:
    """Parameter name -> slot -> the stored key of that slot's tensor."""
    head = f"{prefix}.state."
    in_values = set(referenced(tree))
    found: dict[str, dict[str, str]] = {}
    for key in plan.stored_keys():
        if key.startswith(head) and key not in in_values:
            rest = key.removeprefix(head)
            name, _, slot = rest.rpartition(".")
            while name and name not in saved:
                name = name.rpartition(".")[0]
            if name:
                slot = rest.removeprefix(f"{name}.")
            else:
                name, _, slot = rest.rpartition(".")
            found.setdefault(name, {})[slot] = key
    return found


def _plan_slots(
    plan: RestorePlan,
    prefix: str,
    optimizer: Optimizer,
    param: _Param,
    stored: dict[str, str],
    state_tree: dict[str, Any],
    shared: dict[str, Tensor],
) -> None:
    live = optimizer.state.get(param.tensor, {})
    tensor = param.tensor if isinstance(param.tensor, Tensor) else None
    if param.saved in state_tree:
        param.slots = plan.with_tensors(
            state_tree[param.saved], lambda _: None if tensor is None else tensor.device
        )
    if not isinstance(param.slots, dict) or not isinstance(live, dict):
        return
    for slot, key in stored.items():
        name, source = f"{prefix}.state.{param.name}.{slot}", plan.stored_name(key) or key
        here = live.get(slot)
        if isinstance(here, Tensor):
            plan.fill(name, source, here, live=True)
            param.slots[slot] = here
        elif key in plan.manifest.aliases and source in shared:
            # One tensor served several slots when saved: it does again.
            param.slots[slot] = shared[source]
        else:
            like = _slot_like(param, slot, plan.info(source).shape)
            param.slots[slot] = shared[source] = plan.fresh(name, source, like)
    if param.slots:
        for slot in live.keys() - param.slots.keys():
            plan.differ("missing", f"{prefix}.state.{param.name}.{slot}")


def _slot_like(param: _Param, slot: str, shape: tuple[int, ...]) -> Like:
    if not isinstance(param.tensor, Tensor):
        return None
    if slot == "step" or (shape == () and param.tensor.dim() > 0):
        # Optimizers keep their counters on the CPU unless their kernels read them on the device.
        on_device = param.group.get("capturable") or param.group.get("fused")
        return param.tensor.device if on_device else torch.device("cpu")
    return param.tensor


def _plan_options(
    plan: RestorePlan, optimizer: Optimizer, saved: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each live group the options to set."""
    groups = []
    for group, options in zip(optimizer.param_groups, saved, strict=False):
        chosen = {}
        for option, value in options.items():
            here = group.get(option)
            if option in _OWN or option not in group or isinstance(here, Tensor) != bool(referenced(value)):
                continue
            chosen[option] = plan.with_tensors(value, lambda _, here=here: here)  # type: ignore[misc]
        groups.append(chosen)
    return groups


def _assign(optimizer: Optimizer, params: Sequence[_Param], groups: Sequence[dict[str, Any]]) -> None:
    for param in params:
        if not isinstance(param.slots, dict):
            optimizer.state[param.tensor] = param.slots
        elif param.slots:
            optimizer.state[param.tensor].update(param.slots)
        else:
            # Saved before this parameter's first step.
            optimizer.state.pop(param.tensor, None)
    for group, options in zip(optimizer.param_groups, groups, strict=False):
        for option, value in options.items():
            if isinstance(group[option], Tensor):
                # In place: a captured graph or a compiled step may hold this very tensor.
                write(group[option], value)
            else:
                group[option] = value
