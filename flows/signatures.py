"""What a `_target_` takes, read from its source text: nothing is imported, so the flow process stays without
torch."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Signature:
    """Names a target takes, each with its annotation as text ("" where there is none), and whether it takes
    any."""

    name: str
    parameters: dict[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    takes_any: bool = False


class NotFoundError(Exception):
    """A target's module or name does not exist."""


def signature(target: str) -> Signature | None:
    """The signature of `package.module.name`, or None if it isn't written in Python source that can be read.

    NotFoundError if its top package isn't installed, or the module plainly has no such name.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise NotFoundError(f"'{target}' is not a full name such as package.module.Name")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise NotFoundError(f"there is no package '{module.partition('.')[0]}' in this environment")
    found = _lookup(module, name, frozenset())
    return None if found is None else _describe(target, *found)


@lru_cache(maxsize=256)
def _source(module: str) -> Path | None:
    """The file of a module, found without importing any package above it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.builtin_module_names else None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
        if base.is_dir() or any(base.parent.glob(f"{base.name}.*.so")):
            return None
    raise NotFoundError(f"there is no module '{module}'")


@lru_cache(maxsize=256)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _lookup(module: str, name: str, seen: frozenset[tuple[str, str]]) -> tuple[str, Definition] | None:
    """Follow a name through re-exports to the module that defines it."""
    path = _source(module)
    if path is None or (module, name) in seen:
        return None
    seen |= {(module, name)}
    stars = []
    nodes = list(ast.walk(_tree(path)))
    for item in _tree(path).body:
        if isinstance(item, Definition) and item.name == name:
            return module, item
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    stars.append(_absolute(module, path, node))
                elif (alias.asname or alias.name) == name:
                    found = _lookup(_absolute(module, path, node), alias.name, seen)
                    if found is not None:
                        return found
    for star in stars:
        with contextlib.suppress(NotFoundError):
            found = _lookup(star, name, seen)
            if found is not None:
                return found
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in _tree(path).body):
        return _lookup_lazy(module, name, path, seen)
    if not stars and not any(isinstance(n, ast.Name | ast.alias) and name in _names(n) for n in nodes):
        raise NotFoundError(f"module '{module}' has no '{name}'")
    return None


def _names(node: ast.Name | ast.alias) -> tuple[str, ...]:
    return (node.id,) if isinstance(node, ast.Name) else (node.asname or node.name, node.name)


def _lookup_lazy(
    module: str, name: str, path: Path, seen: frozenset[tuple[str, str]]
) -> tuple[str, Definition] | None:
    """A package that gives out its names lazily: the defining module is one of its own, so look through
    them."""
    if path.name != "__init__.py":
        return None
    for sibling in sorted(path.parent.glob("*.py")):
        if sibling.name.startswith("__"):
            continue
        for node in _tree(sibling).body:
            if isinstance(node, Definition) and node.name == name:
                return _lookup(f"{module}.{sibling.stem}", name, seen)
    raise NotFoundError(f"package '{module}' has no '{name}'")


def _absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if path.name == "__init__.py" else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def _describe(target: str, module: str, node: Definition) -> Signature:
    if not isinstance(node, ast.ClassDef):
        return _arguments(target, node, skip=0)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _arguments(target, item, skip=1)
    bases = [_base(module, base) for base in node.bases]
    if not _is_dataclass(node):
        known = [b for b in bases if b is not None]
        return known[0] if known else Signature(target, takes_any=bool(node.bases))
    parameters: dict[str, str] = {}
    required: list[str] = []
    for base in bases:
        if base is not None:
            parameters |= base.parameters
            required += base.required
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            annotation = ast.unparse(item.annotation)
            if annotation.startswith(("ClassVar", "typing.ClassVar")):
                continue
            parameters[item.target.id] = annotation
            if item.value is None:
                required.append(item.target.id)
    return Signature(target, parameters, tuple(required))


def _base(module: str, base: ast.expr) -> Signature | None:
    if not isinstance(base, ast.Name):
        return None
    try:
        found = _lookup(module, base.id, frozenset())
    except NotFoundError:
        return None
    return None if found is None else _describe(f"{found[0]}.{base.id}", *found)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def _arguments(target: str, node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int) -> Signature:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args][skip:]
    named = [*positional, *spec.kwonlyargs]
    missing = positional[: len(positional) - len(spec.defaults)] if spec.defaults else positional
    missing = [*missing, *(a for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is None)]
    return Signature(
        target,
        {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in named},
        tuple(a.arg for a in missing),
        takes_any=spec.kwarg is not None,
    )
