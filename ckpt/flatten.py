"""Turn a live training state into a flat list of named tensors and plain values.

Flattening happens once. Later saves walk no module: `Flat.quick` and `Flat.thorough` compare object
identities, `Flat.collect` evaluates the small part that may change at any time. No tensor is copied.

Names. A module's tensors are `<entry>.<fqn>` with no wrapper in the fqn, an optimizer's are
`<entry>.state.<parameter fqn>.<slot>`, those inside any other object's state `<entry>.<path>`.
Inside values a `TensorRef(key)` holds a tensor's place. An object with a true `per_rank`
attribute is named `<entry>/rank-00000` instead of `<entry>`.

Values, by kind of entry:

- module: `{"extra_state": {module fqn: value}, "evaluated": {fqn: value}}` (the second for what
  state_dict hooks add), each only if there is any; no value at all without both.
- optimizer: `{"param_groups": [{option: value}], "state": {parameter fqn: {slot: value}}}`.
  Slots that are tensors are not in "state" (their keys tell), unless a parameter's state nests
  containers (LBFGS): then all of it is. The parameter names of each group are a value of their
  own, `<entry>/params`, because they change only with the structure.
- others: what `state_dict()` returned, or the plain value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.module_names import clean_key, clean_paths
from ckpt.tensor_kinds import is_dtensor, refuse_unstorable, same_memory
from ckpt.values import TensorRef, encode
from ckpt.watch import Watch

Kind = Literal["step", "call"]


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """One stored tensor.

    `kind` "step": it changes only inside `optimizer.step()` or an update right after it, and may
    be copied while the next forward and backward run. "call": it may change at any time, and is
    copied at the call.
    """

    key: str
    tensor: Tensor
    kind: Kind
    per_rank: bool


class Collected(NamedTuple):
    """What is evaluated anew at every save."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Restructured(Exception):  # noqa: N818
    """The state has another structure than when it was flattened."""


Source = Callable[[Collected], None]


@dataclass(eq=False)
class Flat:
    """A flattened state: `tensors` has each memory once, `aliases` the other keys of the same memory and
    `aliasing` the tensors behind those keys.

    `quick` watches what may look changed while a forward runs (a functional call swaps parameters for
    a while), and what changes most often; it is for the training thread. `thorough` watches the rest:
    modules and optimizer slots, which any thread may look at.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    aliasing: dict[str, Tensor] = field(default_factory=dict)
    static: dict[str, Any] = field(default_factory=dict)
    quick: Watch = field(default_factory=Watch)
    thorough: Watch = field(default_factory=Watch)
    _sources: list[Source] = field(default_factory=list)
    _call: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """All values as they are now, with a `TensorRef` where a tensor belongs."""
        return {**self.static, **self.collect().values}

    def collect(self) -> Collected:
        """Evaluate buffers, param groups, `state_dict`s of other objects and plain values as they are now.

        Returns the "call" tensors by key (live, not copied) and the values by entry name (not encoded).
        Raises Restructured if a tensor is where none was, or none where one was.
        """
        now = Collected({}, {})
        for source in self._sources:
            source(now)
        return now

    def fits(self, now: Collected) -> bool:
        """Whether freshly collected "call" tensors have the keys, dtypes and shapes of the plan."""
        planned = self._call
        return planned.keys() == now.tensors.keys() and all(
            (tensor.dtype, tensor.shape) == planned[key] for key, tensor in now.tensors.items()
        )


def flatten(state: Mapping[str, Any], rank: int = 0) -> Flat:
    """Flatten modules, optimizers, objects with `state_dict`/`load_state_dict` and plain values.

    Raises StateError, naming the entry, for a tensor or a value that can't be stored, or two things with one
    name.
    """
    flat = Flat()
    known: dict[tuple[Any, ...], str] = {}
    names: dict[int, tuple[str, str]] = {}
    for entry, thing in state.items():
        if isinstance(thing, nn.Module):
            flat.quick.add(state, entry, thing)
            _flatten_module(flat, entry_name(entry, thing, rank), thing, known, names)
    for entry, thing in state.items():
        prefix = entry_name(entry, thing, rank)
        if isinstance(thing, Optimizer):
            flat.quick.add(state, entry, thing)
            _flatten_optimizer(flat, prefix, thing, known, names)
        elif not isinstance(thing, nn.Module):
            flat._sources.append(_object_source(state, entry, prefix))
    flat.quick.add_size(state)
    now = flat.collect()
    for entry, value in now.values.items():
        encode(value, entry)  # what can't be stored is named before training goes on, not at the first save
    for key, tensor in now.tensors.items():
        if key in flat.tensors:
            raise StateError(f"two tensors of the state are both named {key!r}: rename one of the entries")
        refuse_unstorable(key, tensor)
        flat.tensors[key] = TensorEntry(key, tensor, "call", "/rank-" in key)
        flat._call[key] = (tensor.dtype, tensor.shape)
    return flat


def entry_name(entry: str, thing: Any, rank: int) -> str:
    """The name under which an entry is stored: the entry's own, or one per rank."""
    return f"{entry}/rank-{rank:05d}" if getattr(thing, "per_rank", False) is True else entry


def extract(tree: Any, path: str, out: dict[str, Tensor]) -> Any:
    """Copy a tree of dicts, lists and tuples with its tensors moved into `out` and refs in their places."""
    if isinstance(tree, Tensor):
        key, n = path, 1
        while key in out:
            n += 1
            key = f"{path}#{n}"
        out[key] = tree.detach()
        return TensorRef(key)
    if isinstance(tree, Mapping) and type(tree).__module__ in ("builtins", "collections"):
        return {k: extract(v, f"{path}.{k}", out) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(extract(v, f"{path}.{i}", out) for i, v in enumerate(tree))
    return tree


def put_back(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `extract`. Raises KeyError for a tensor that is not among `tensors`."""
    if isinstance(tree, TensorRef):
        return tensors[tree.key]
    if isinstance(tree, dict):
        return {k: put_back(v, tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(put_back(v, tensors) for v in tree)
    return tree


def parameter_names(state: Mapping[str, Any], rank: int = 0) -> dict[str, list[list[str]]]:
    """For every optimizer's stored name, the parameter names of each of its groups, in order."""
    names: dict[int, tuple[str, str]] = {}
    for entry, thing in state.items():
        if isinstance(thing, nn.Module):
            _flatten_module(Flat(), entry_name(entry, thing, rank), thing, {}, names)
    return {
        entry_name(entry, thing, rank): _group_names(thing, names)
        for entry, thing in state.items()
        if isinstance(thing, Optimizer)
    }


def _add(flat: Flat, key: str, tensor: Tensor, kind: Kind, known: dict[tuple[Any, ...], str]) -> bool:
    """Add a live tensor, or an alias of one that has the same memory. True if it was new."""
    if key in flat.tensors or key in flat.aliases:
        raise StateError(f"two tensors of the state are both named {key!r}: rename one of the entries")
    refuse_unstorable(key, tensor)
    memory = same_memory(tensor)
    if memory in known:
        flat.aliases[key] = known[memory]
        flat.aliasing[key] = tensor
        return False
    known[memory] = key
    flat.tensors[key] = TensorEntry(key, tensor, kind, "/rank-" in key)
    return True


def _flatten_module(
    flat: Flat,
    prefix: str,
    root: nn.Module,
    known: dict[tuple[Any, ...], str],
    names: dict[int, tuple[str, str]],
) -> None:
    # state_dict decides what is stored (hooks, persistence) and makes FSDP put its shards back in place.
    stored: Mapping[str, Any] = root.state_dict(keep_vars=True)
    paths = clean_paths(root)
    live: dict[str, tuple[Mapping[str, Any], str, bool]] = {}
    extra: list[tuple[str, nn.Module]] = []
    for raw, module in root.named_modules(remove_duplicate=False):
        dot = f"{raw}." if raw else ""
        holders: tuple[tuple[bool, Mapping[str, Any]], ...] = (
            (False, module._parameters),
            (True, module._buffers),
        )
        for is_buffer, holder in holders:
            live.update({dot + name: (holder, name, is_buffer) for name in holder})
            flat.thorough.add_size(holder)
        if f"{dot}_extra_state" in stored:
            extra.append((paths[raw], module))
        flat.thorough.add_size(module._modules)
        for name, child in module._modules.items():
            flat.thorough.add(module._modules, name, child)
    buffers: list[tuple[str, Mapping[str, Any], str]] = []
    evaluated: list[tuple[str, str]] = []
    for raw, value in stored.items():
        holder, name, is_buffer = live.get(raw, ({}, "", False))
        key = f"{prefix}.{clean_key(raw, paths)}"
        if raw.endswith("_extra_state") and not isinstance(value, nn.Parameter):
            continue
        is_live = holder.get(name) is value
        if not is_live or not isinstance(value, Tensor):
            evaluated.append((clean_key(raw, paths), raw))
        elif is_buffer:
            memory = same_memory(value)
            if memory in known and value.numel():
                flat.quick.add(holder, name, value)
                flat.aliases[key] = known[memory]
                flat.aliasing[key] = value
            else:
                known[memory] = key
                buffers.append((key, holder, name))
        else:
            _add(flat, key, value, "step", known)
            names.setdefault(id(value), (prefix, clean_key(raw, paths)))
            if not is_dtensor(value):
                flat.quick.add(holder, name, value)
    if buffers or extra or evaluated:
        flat._sources.append(_module_source(prefix, root, buffers, extra, evaluated))


def _module_source(
    prefix: str,
    root: nn.Module,
    buffers: list[tuple[str, Mapping[str, Any], str]],
    extra: list[tuple[str, nn.Module]],
    evaluated: list[tuple[str, str]],
) -> Source:
    def source(now: Collected) -> None:
        for key, holder, name in buffers:
            buffer = holder.get(name)
            if buffer is None:
                raise Restructured(key)
            now.tensors[key] = buffer.detach()
        values: dict[str, Any] = {}
        if extra:
            got = {path: module.get_extra_state() for path, module in extra}
            values["extra_state"] = extract(got, f"{prefix}.extra_state", now.tensors)
        if evaluated:
            whole = root.state_dict()
            got = {clean: whole[raw] for clean, raw in evaluated if raw in whole}
            values["evaluated"] = extract(got, f"{prefix}.evaluated", now.tensors)
        if values:
            now.values[prefix] = values

    return source


def _flatten_optimizer(
    flat: Flat,
    prefix: str,
    optimizer: Optimizer,
    known: dict[tuple[Any, ...], str],
    names: dict[int, tuple[str, str]],
) -> None:
    _refuse_extra_optimizer_state(prefix, optimizer)
    groups = _group_names(optimizer, names)
    flat.static[f"{prefix}/params"] = groups
    fqns = {
        id(p): n
        for group, group_names in zip(optimizer.param_groups, groups, strict=True)
        for p, n in zip(group["params"], group_names, strict=True)
    }
    plain: list[tuple[str, dict[str, Any], list[str]]] = []
    nested: list[tuple[str, dict[str, Any]]] = []
    # `load_state_dict` puts new containers in the place of both.
    own = vars(optimizer)
    for name in ("state", "param_groups"):
        if name in own:
            flat.quick.add(own, name, own[name])
    flat.quick.add_size(optimizer.state)
    flat.quick.add_size(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        flat.quick.add_size(group["params"])
        flat.thorough.add(optimizer.param_groups, index, group)
        flat.thorough.add(group, "params", group["params"])
        for place, parameter in enumerate(group["params"]):
            flat.thorough.add(group["params"], place, parameter)
    for p, slots in optimizer.state.items():
        fqn = fqns.get(id(p)) or (p if isinstance(p, str) else None)
        if fqn is None:
            raise StateError(
                f"{prefix}.state holds an entry for a parameter that is in none of its param groups"
            )
        flat.thorough.add(optimizer.state, p, slots)
        if not isinstance(slots, dict) or any(isinstance(v, dict | list | tuple) for v in slots.values()):
            nested.append((fqn, slots))
            continue
        flat.thorough.add_size(slots)
        others = []
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                _add(flat, f"{prefix}.state.{fqn}.{slot}", value, "step", known)
                flat.thorough.add(slots, slot, value)
            else:
                others.append(slot)
        if others:
            plain.append((fqn, slots, others))
    flat._sources.append(_optimizer_source(prefix, optimizer, plain, nested))


def _optimizer_source(
    prefix: str,
    optimizer: Optimizer,
    plain: list[tuple[str, dict[str, Any], list[str]]],
    nested: list[tuple[str, dict[str, Any]]],
) -> Source:
    def source(now: Collected) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        slots: dict[str, Any] = {
            fqn: {name: holder[name] for name in others} for fqn, holder, others in plain
        }
        for fqn, values in slots.items():
            if any(isinstance(value, Tensor) for value in values.values()):
                raise Restructured(fqn)
        slots.update({fqn: extract(tree, f"{prefix}.state.{fqn}", now.tensors) for fqn, tree in nested})
        now.values[prefix] = {
            "param_groups": extract(groups, f"{prefix}.param_groups", now.tensors),
            "state": slots,
        }

    return source


def _object_source(state: Mapping[str, Any], entry: str, prefix: str) -> Source:
    def source(now: Collected) -> None:
        thing = state[entry]
        tree = thing.state_dict() if is_stateful(thing) else thing
        now.values[prefix] = extract(tree, prefix, now.tensors)

    return source


def is_stateful(thing: Any) -> bool:
    """Whether an object saves and restores itself by `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _group_names(optimizer: Optimizer, names: dict[int, tuple[str, str]]) -> list[list[str]]:
    """Parameter names per group: the fqn alone where all come from one module entry, else `<entry>.<fqn>`."""
    entries = {names[id(p)][0] for g in optimizer.param_groups for p in g["params"] if id(p) in names}

    def name(g: int, i: int, p: Tensor) -> str:
        if id(p) not in names:
            return f"param_groups.{g}.{i}"
        entry, fqn = names[id(p)]
        return fqn if len(entries) == 1 else f"{entry}.{fqn}"

    return [
        [name(g, i, p) for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _refuse_extra_optimizer_state(prefix: str, optimizer: Optimizer) -> None:
    if type(optimizer).state_dict is Optimizer.state_dict and not optimizer._optimizer_state_dict_post_hooks:
        return
    extra = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
    if extra:
        raise StateError(
            f"{prefix}: {type(optimizer).__name__} has {', '.join(extra)} beside its state and param groups, "
            "where it would be lost: give the manager an entry of its own that saves and restores it"
        )
