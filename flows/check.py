"""Check a composed config before anything is made from it: nothing missing, nothing unknown, nothing of a
wrong kind."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from flows.config import nearest
from flows.overrides import ConfigError
from flows.schema import NODES, RANGES, Root
from flows.signatures import NotFoundError, signature

_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(,)?")
_HYDRA_ONLY = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})


def resolve(tree: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Plain values of an OmegaConf tree, and the keys whose value came from the environment, with their text.

    ConfigError lists every value that is missing (`???`), every environment variable that isn't set, every
    ${hydra:...} (which means nothing outside Hydra's own launcher) and every interpolation that leads
    nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw = OmegaConf.to_container(tree, resolve=False)
    problems = []
    hidden = {}
    for dotted, text in _leaves(raw, ""):
        if not isinstance(text, str):
            continue
        unset = [name for name, default in _ENV.findall(text) if not default and name not in os.environ]
        if text == "???":
            problems.append(f"{dotted} has no value: give it one with {dotted}=...")
        elif "${hydra:" in text:
            problems.append(
                f"{dotted} is {text}: ${{hydra:...}} has no value in a flow; write the value itself"
            )
        elif unset:
            problems.append(f"{dotted} needs the environment variable {', '.join(unset)}, which is not set")
        else:
            try:
                OmegaConf.select(tree, dotted, throw_on_missing=True)
            except OmegaConfBaseException as error:
                problems.append(f"{dotted} is {text}: {str(error).splitlines()[0]}")
        if "${oc.env:" in text:
            hidden[dotted] = text
    if problems:
        raise ConfigError("\n".join(problems))
    values = OmegaConf.to_container(tree, resolve=True, enum_to_str=True)
    return plain(values), hidden


def plain(value: Any, dotted: str = "") -> Any:
    """The value as JSON's own kinds: tuples become lists, paths, dates and bytes their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v, f"{dotted}.{k}" if dotted else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{dotted}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value)


def check(values: dict[str, Any]) -> None:
    """Hold every node against its schema or its target's signature. ConfigError lists all that is wrong."""
    problems = list(_check_node(values, "", Root))
    if problems:
        # A value that other settings are derived from is named once, where it was given.
        first = {text.partition("=")[2] or text: text for text in reversed(problems)}
        raise ConfigError("\n".join(text for text in problems if text in first.values()))


def _leaves(node: Any, dotted: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{dotted}.{key}" if dotted else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{dotted}[{i}]")
    else:
        yield dotted, node


def _check_node(node: dict[str, Any], dotted: str, schema: type) -> Iterator[str]:
    kinds = {f.name: str(f.type) for f in dataclasses.fields(schema)}
    needed = [f.name for f in dataclasses.fields(schema) if f.default is dataclasses.MISSING]
    for key, value in node.items():
        where = f"{dotted}.{key}" if dotted else key
        if key not in kinds:
            yield _unknown(where, key, kinds, f"{dotted or 'the config'} takes")
        elif (kind := kinds[key].removesuffix(" | None")) in NODES:
            if isinstance(value, dict):
                yield from _check_node(value, where, NODES[kind])
            elif value is not None or kind == kinds[key]:
                yield f"{where}={_shown(value)} must be a group of settings"
        elif kinds[key] == "Target":
            yield from _check_target(value, where)
        else:
            yield from _check_value(value, where, kinds[key])
    for key in needed:
        if key in node:
            continue
        yield f"{f'{dotted}.{key}' if dotted else key} is missing from the config"


def _check_target(node: Any, dotted: str) -> Iterator[str]:
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        group = dotted.replace(".", "/")
        yield f"{dotted} needs a _target_, the full name of what makes it: choose {group}=..."
        return
    try:
        found = signature(node["_target_"])
    except NotFoundError as error:
        yield f"{dotted}._target_={node['_target_']}: {error}"
        return
    if found is None:
        return
    for key, value in node.items():
        where = f"{dotted}.{key}"
        if key in _HYDRA_ONLY:
            continue
        if key not in found.parameters:
            if not found.takes_any:
                yield _unknown(where, key, found.parameters, f"{found.name} takes")
        elif isinstance(value, dict) and "_target_" in value:
            yield from _check_target(value, where)
        else:
            yield from _check_value(value, where, found.parameters[key])


def _unknown(where: str, key: str, known: Any, takes: str) -> str:
    node = where.rpartition(".")[0]
    hint = nearest(key, known)
    if hint:
        close = hint.split("'")[1]
        return f"unknown key {where}, did you mean '{f'{node}.{close}' if node else close}'?"
    return f"unknown key {where}; {takes}: {', '.join(sorted(known))}"


def _check_value(value: Any, where: str, kind: str) -> Iterator[str]:
    if kind and not _fits(value, ast.parse(kind, mode="eval").body):
        yield f"{where}={_shown(value)} must be {_kind_text(kind)}"
        return
    if where == "checkpoint.keep.n" and value == 0:
        yield f"{where}=0 would keep no checkpoint to resume from: keep 1 or more, or all with {where}=null"
    low, high = RANGES.get(where, (None, None))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if math.isnan(value):
        yield f"{where}={value} must be a number"
    elif low is not None and value < low:
        yield f"{where}={value} must be at least {low:g}"
    elif high is not None and value > high:
        yield f"{where}={value} must be at most {high:g}"


def _fits(value: Any, kind: ast.expr) -> bool:
    """Whether a plain value may stand for an annotation; annotations that aren't plain kinds take
    anything."""
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        return _fits(value, kind.left) or _fits(value, kind.right)
    if isinstance(kind, ast.Constant):
        if isinstance(kind.value, str):
            return _fits(value, ast.parse(kind.value, mode="eval").body)
        return kind.value is None and value is None
    if isinstance(kind, ast.Name):
        return {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, int | float) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
            "dict": isinstance(value, dict),
            "list": isinstance(value, list),
            "tuple": isinstance(value, list),
        }.get(kind.id, True)
    if isinstance(kind, ast.Subscript):
        return _fits_subscript(value, ast.unparse(kind.value).rpartition(".")[2], kind.slice)
    return True


def _fits_subscript(value: Any, outer: str, inner: ast.expr) -> bool:
    items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Optional":
        return value is None or _fits(value, inner)
    if outer == "Union":
        return any(_fits(value, item) for item in items)
    if outer == "Literal":
        return value in [i.value for i in items if isinstance(i, ast.Constant)]
    if outer in ("list", "List", "Sequence", "tuple", "Tuple"):
        if not isinstance(value, list):
            return False
        if outer in ("tuple", "Tuple") and not any(
            isinstance(i, ast.Constant) and i.value is ... for i in items
        ):
            return len(value) == len(items) and all(_fits(v, i) for v, i in zip(value, items, strict=True))
        return all(_fits(v, items[0]) for v in value)
    if outer in ("dict", "Dict", "Mapping"):
        return isinstance(value, dict)
    return True


def _kind_text(kind: str) -> str:
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "None": "null",
    }
    if kind.startswith("Literal["):
        return "one of " + ", ".join(part.strip(" '\"") for part in kind[8:-1].split(","))
    return " or ".join(words.get(part.strip(), part.strip()) for part in kind.split("|"))


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
