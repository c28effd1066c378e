"""Match a live state with a checkpoint, entry by entry, into a `RestorePlan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt.flatten import Flat, entry_name, is_stateful
from ckpt.manifest import Manifest
from ckpt.module_names import clean_key, clean_paths
from ckpt.restore_optimizer import match_optimizer
from ckpt.restore_plan import Like, RestorePlan, fresh_like, referenced
from ckpt.restore_write import write

__all__ = ["match_state"]


def match_state(
    manifest: Manifest, state: Mapping[str, Any], flat: Flat, rank: int, world_size: int
) -> RestorePlan:
    """What has to be read and done on this rank to bring `state` (flattened as `flat`) to the checkpoint's.

    An entry that is kept per rank takes what the same rank saved. On a rank that the checkpoint knows
    nothing of it stays as it was built, which is noted: another rank's copy would make two ranks draw the
    same numbers. Raises Corrupt for values that can't be decoded.
    """
    plan = RestorePlan(manifest)
    entries = {entry_name(entry, thing, rank): (entry, thing) for entry, thing in state.items()}
    modules = [prefix for prefix, (_, thing) in entries.items() if isinstance(thing, nn.Module)]
    known: set[str] = set()
    in_values = {key for name in manifest.values for key in referenced(plan.tree(name))}
    now = flat.collect()
    evaluated = {key for prefix in modules for key in referenced(now.values.get(prefix))}
    live: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in entries}
    for key, item in flat.tensors.items():
        if key not in evaluated:
            live[_owner(key, entries)][key] = item.tensor
    aliases = {alias: key for alias, key in flat.aliases.items() if _owner(alias, entries) in modules}
    tied_twice = _stored_twice(plan, aliases)
    for prefix, (entry, thing) in entries.items():
        if _is_new_rank(plan, prefix, entry, rank):
            continue
        if isinstance(thing, nn.Module):
            _match_tensors(plan, live[prefix], tied_twice, in_values)
            _match_module_values(plan, prefix, thing, flat, now.values.get(prefix, {}))
            known |= live[prefix].keys()
        elif not isinstance(thing, Optimizer):
            _match_object(plan, prefix, state, entry, flat)
    for alias in aliases:
        if plan.stored_name(alias) is None:
            plan.differ("missing", alias)
    known |= aliases.keys()
    for prefix, (entry, thing) in entries.items():
        if isinstance(thing, Optimizer) and not _is_new_rank(plan, prefix, entry, rank):
            known |= match_optimizer(plan, prefix, thing, flat.static[f"{prefix}/params"], list(modules))
    _note_ranks(plan, entries, rank, world_size)
    _list_unexpected(plan, entries, known | in_values)
    return plan


def _owner(key: str, entries: Mapping[str, Any]) -> str:
    """The entry that a tensor's key belongs to: of those whose name it starts with, the longest."""
    fitting = [prefix for prefix in entries if key == prefix or key.startswith(f"{prefix}.")]
    return max(fitting, key=len)


def _match_tensors(
    plan: RestorePlan, live: Mapping[str, Tensor], tied_twice: Mapping[str, list[str]], in_values: set[str]
) -> None:
    for key, tensor in live.items():
        stored = plan.stored_name(key)
        if stored is None or key in in_values:
            plan.differ("missing", key)
        elif key not in tied_twice:
            plan.fill(key, stored, tensor, live=True)
        elif plan.fill(key, stored, fresh_like(tensor, tuple(tensor.shape), tensor.dtype), live=False):
            _add_tied(plan, key, tensor, tied_twice[key])


def _stored_twice(plan: RestorePlan, aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """What is one tensor here, but several in the checkpoint: key -> the other names."""
    found: dict[str, list[str]] = {}
    for alias, key in aliases.items():
        one, two = plan.stored_name(key), plan.stored_name(alias)
        if one is not None and two is not None and one != two:
            found.setdefault(key, []).append(alias)
    return found


def _add_tied(plan: RestorePlan, key: str, tensor: Tensor, aliases: list[str]) -> None:
    for alias in aliases:
        other = fresh_like(tensor, tuple(tensor.shape), tensor.dtype)
        if plan.fill(alias, plan.stored_name(alias) or alias, other, live=False):
            plan.same.append((alias, key))
    landed = plan.targets[key].tensor
    plan.actions.append((key, lambda: write(tensor, landed)))


def _match_module_values(
    plan: RestorePlan, prefix: str, root: nn.Module, flat: Flat, now: Mapping[str, Any]
) -> None:
    saved = plan.tree(prefix) if plan.has_values(prefix) else {}
    paths = clean_paths(root)
    for part in ("extra_state", "evaluated"):
        here = {clean_key(key, paths) if part == "evaluated" else key for key in now.get(part, {})}
        there = saved.get(part, {})
        suffix = "._extra_state" if part == "extra_state" else ""
        for name in here - there.keys():
            plan.differ("missing", f"{prefix}.{name}{suffix}")
        for name in there.keys() - here:
            plan.differ("unexpected", f"{prefix}.{name}{suffix}")
        there = {name: value for name, value in there.items() if name in here}
        if there:
            tree = plan.with_tensors(there, _beside(flat))
            put = _put_extra_state if part == "extra_state" else _put_evaluated
            plan.actions.append((prefix, lambda put=put, tree=tree: put(root, tree)))  # type: ignore[misc]


def _put_extra_state(root: nn.Module, tree: Mapping[str, Any]) -> None:
    paths = clean_paths(root)
    done: set[str] = set()
    for raw, module in root.named_modules(remove_duplicate=False):
        name = paths[raw]
        # A wrapper has the clean name of what it wraps, but keeps no extra state itself.
        if (
            name in tree
            and type(module).set_extra_state is not nn.Module.set_extra_state
            and name not in done
        ):
            module.set_extra_state(tree[name])
            done.add(name)


def _put_evaluated(root: nn.Module, tree: Mapping[str, Any]) -> None:
    paths = clean_paths(root)
    raw_keys = {clean_key(raw, paths): raw for raw in root.state_dict()}
    root.load_state_dict({raw_keys[name]: value for name, value in tree.items()}, strict=False)


def _match_object(plan: RestorePlan, prefix: str, state: Mapping[str, Any], entry: str, flat: Flat) -> None:
    """Plan an object with `load_state_dict`, or a plain value.

    A plain dict, list or set is changed in place, since the training loop holds the object itself; any other
    plain value is replaced in the state's mapping.
    """
    if not plan.has_values(prefix):
        plan.differ("missing", prefix)
        return
    thing = state[entry]
    if isinstance(thing, Tensor):
        stored = plan.stored_name(prefix)
        if stored is None:
            plan.differ("other", prefix, "a plain value in the checkpoint, a tensor here")
        else:
            plan.fill(prefix, stored, thing.detach(), live=True)
        return
    value = plan.with_tensors(plan.tree(prefix), _beside(flat))
    if is_stateful(thing):
        plan.actions.append((prefix, lambda: thing.load_state_dict(value)))
    elif type(thing) is type(value) and isinstance(value, dict | list | set):
        plan.actions.append((prefix, lambda: _refill(thing, value)))
    elif isinstance(state, MutableMapping):
        plan.actions.append((prefix, lambda: state.__setitem__(entry, value)))
    else:
        plan.differ("other", prefix, "a plain value, which can't be put back into a state that is read-only")


def _refill(held: Any, value: Any) -> None:
    held.clear()
    if isinstance(held, list):
        held.extend(value)
    else:
        held.update(value)


def _beside(flat: Flat) -> Callable[[str], Like]:
    """Tensors inside values lie where the live object keeps its own of the same name, else on the CPU."""

    def like(key: str) -> Like:
        return flat.tensors[key].tensor if key in flat.tensors else None

    return like


def _is_new_rank(plan: RestorePlan, prefix: str, entry: str, rank: int) -> bool:
    return prefix != entry and rank >= plan.manifest.world_size


def _note_ranks(
    plan: RestorePlan, entries: Mapping[str, tuple[str, Any]], rank: int, world_size: int
) -> None:
    saved = plan.manifest.world_size
    per_rank = sorted(entry for prefix, (entry, _) in entries.items() if prefix != entry)
    if saved == world_size or not per_rank:
        return
    what = f"{plan.manifest.attempt} was saved by {saved} ranks and is restored on {world_size}: "
    if rank >= saved:
        plan.notes.append(f"{what}{', '.join(per_rank)} of rank {rank} starts as it was built")
    elif rank == 0 and saved > world_size:
        plan.notes.append(f"{what}{', '.join(per_rank)} of ranks {world_size} to {saved - 1} is left unused")


def _list_unexpected(plan: RestorePlan, entries: Mapping[str, tuple[str, Any]], known: set[str]) -> None:
    per_rank = {entry for prefix, (entry, _) in entries.items() if prefix != entry}

    def is_other_ranks(name: str) -> bool:
        return any(name.startswith(f"{entry}/rank-") for entry in per_rank)

    for key in plan.stored_keys():
        if key not in known and not is_other_ranks(key):
            plan.differ("unexpected", key)
    for name in plan.manifest.values:
        if name.removesuffix("/params") not in entries and not is_other_ranks(name):
            plan.differ("unexpected", name)
