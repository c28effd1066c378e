"""Compose the configuration, and make plain JSON of it."""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flows.overrides import ConfigError, normalise, split
from flows.project import project_dir, project_name

_LOCK = threading.RLock()


@dataclass(frozen=True)
class Composed:
    """A checked config: `values` is plain JSON with every interpolation resolved, `saved` is the same without
    secrets, `choices` says which member of each group was chosen, `overrides` are those that may be saved."""

    values: dict[str, Any]
    saved: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]


def load(name: str, overrides: Sequence[str]) -> Composed:
    """Compose `name` with overrides and check it whole. Touches no storage, and is safe from several threads.

    ConfigError names what is wrong: a group or key that isn't there with the nearest that is, a value that is
    missing or of the wrong kind, an environment variable that isn't set.
    """
    from flows import check, secrets, storage

    texts = normalise(overrides)
    storage.refuse_keys(texts)
    tree, choices = compose(name, texts)
    values, hidden = check.resolve(tree)
    storage.refuse_keys(values=values)
    check.check(values)
    saved = secrets.redact(values, hidden)
    return Composed(values, saved, choices, secrets.redact_overrides(texts))


def register_resolvers() -> None:
    """Make ${project_name:} and ${project_dir:} known; they resolve when a config is used, not when it is
    read."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("project_name", project_name, replace=True)
    OmegaConf.register_new_resolver("project_dir", lambda: str(project_dir()), replace=True)


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    """Hydra's one global instance, borrowed: without the lock, concurrent composes fail."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with _LOCK:
        before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        register_resolvers()
        try:
            with initialize_config_module("conf", version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = before


def compose(name: str, overrides: list[str]) -> tuple[Any, dict[str, str | None]]:
    """The composed tree, neither resolved nor checked, and the member chosen of each group. ConfigError."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    with _hydra():
        try:
            tree = hydra.compose(name, overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise _explained(name, overrides, error) from None
        choices = OmegaConf.to_container(tree.hydra.runtime.choices)
        with open_dict(tree):
            del tree["hydra"]
    assert isinstance(choices, dict)
    return tree, {str(k): v for k, v in choices.items() if not str(k).startswith("hydra/")}


def _explained(name: str, overrides: list[str], error: Exception) -> ConfigError:
    """Hydra's error in one clear line: which override, and what may have been meant."""
    for text in overrides:
        problem = _problem(name, text, overrides)
        if problem:
            return ConfigError(problem)
    first = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return ConfigError(first)


def _problem(name: str, text: str, overrides: list[str]) -> str | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = " ".join(str(error).split())
        return f"{text}: {reason}. Quote a value with special characters: '{split(text).key}=\"...\"'"
    if parsed.is_sweep_override():
        return (
            f"{text} holds several values: add -m to start one run for each, or quote it if it is one value"
        )
    one = split(text)
    groups = _groups()
    if one.key in groups and not isinstance(parsed.value(), dict):
        wanted = parsed.value()
        for choice in wanted if isinstance(wanted, list) else [wanted]:
            if choice is not None and str(choice) not in groups[one.key]:
                return (
                    f"{text}: group {one.key} has no '{choice}'{nearest(str(choice), groups[one.key])}"
                    f" (it has: {', '.join(groups[one.key])})"
                )
        return None
    if one.mode in ("", "~"):
        known = _known_keys(name, [t for t in overrides if split(t).key in groups])
        if known is not None and one.key.startswith("storage.s3.") and "storage.s3" not in known:
            return f"{one.key} is for an object store: add storage=s3, or storage=flashblade_s3"
        if known is not None and one.key not in known:
            return f"unknown key {one.key}{nearest_key(one.key, known | set(groups))}"
    return None


def _groups() -> dict[str, list[str]]:
    """Every config group and its members, by listing the conf package."""
    from importlib.resources import files

    found: dict[str, list[str]] = {}

    def walk(folder: Any, prefix: str) -> None:
        for item in sorted(folder.iterdir(), key=lambda i: i.name):
            if item.is_dir() and not item.name.startswith("_"):
                walk(item, f"{prefix}/{item.name}" if prefix else item.name)
            elif item.name.endswith(".yaml") and prefix:
                found.setdefault(prefix, []).append(item.name.removesuffix(".yaml"))

    walk(files("conf"), "")
    return found


def _known_keys(name: str, overrides: list[str]) -> set[str] | None:
    """Dotted keys of the config composed with the given group choices; None if it doesn't compose."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with _hydra():
        try:
            tree = OmegaConf.to_container(hydra.compose(name, overrides), resolve=False)
        except (HydraException, OmegaConfBaseException):
            return None
    return set(flat_keys(tree))


def flat_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of every node of nested dicts."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        yield dotted
        if isinstance(value, dict):
            yield from flat_keys(value, dotted + ".")


def nearest(word: str, candidates: Any) -> str:
    """ ", did you mean 'x'?" for the candidate that looks most like `word`, or "" if none does."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.55)
    return f", did you mean '{close[0]}'?" if close else ""


def nearest_key(key: str, known: set[str]) -> str:
    """Like `nearest`, for dotted keys: a key of the same node is preferred over one that merely looks
    alike."""
    node, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == node}
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.55)
    if close:
        return f", did you mean '{f'{node}.{close[0]}' if node else close[0]}'?"
    same_leaf = sorted(k for k in known if k.rpartition(".")[2] == leaf)
    if same_leaf:
        return f", did you mean '{same_leaf[0]}'?"
    hint = nearest(key, known)
    if not hint and siblings:
        return f"; {node or 'the config'} has: {', '.join(sorted(siblings))}"
    return hint


def group_label(choice: str | None) -> str | None:
    """A group choice as a name that MLflow and file systems take."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", choice) if choice else None
