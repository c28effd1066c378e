"""Overrides as people type them: what is read as raw text, what is quoted for Hydra's grammar, what is a
flag."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Hydra would make 2026_12_01 an int, 1e3 a float, and fail on unquoted unicode, spaces or `~/x`. These keys
# hold names and paths: whatever stands after their first `=` is text.
RAW_TEXT = frozenset(
    {
        "run", "which", "storage.root", "storage.s3.endpoint", "storage.s3.region", "storage.s3.ca_bundle",
        "tracking.uri", "tracking.experiment",
    }
)  # fmt: skip

# Nodes that hold whatever is put into them, so that `extra.note=x` needs no `+`.
FREE = ("extra", "launcher.env", "tracking.tags")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")

_KEY = re.compile(
    r"(?P<mode>\+\+|\+|~)?(?P<key>[^=@]+)(?P<package>@[^=]*)?(?P<eq>=)?(?P<value>.*)\Z", re.DOTALL
)


class ConfigError(Exception):
    """What was asked for can't be done as asked; the text says why and what to type instead."""


class Override(NamedTuple):
    """One override, split at its first `=`. `mode` is "", "+", "++" or "~"; `value` is None for a bare
    `~key`."""

    mode: str
    key: str
    value: str | None
    text: str


def split(text: str) -> Override:
    """Split one override. ConfigError if it has no `=` and is not a deletion."""
    found = _KEY.match(text)
    if found is None:
        raise ConfigError(f"'{text}' is not an override: write key=value, for example trainer.max_steps=400")
    mode, eq = found["mode"] or "", found["eq"]
    if not eq and mode != "~":
        raise ConfigError(f"'{text}' is not an override: write key=value, for example trainer.max_steps=400")
    return Override(mode, found["key"].strip(), found["value"] if eq else None, text)


def unquote(value: str) -> str:
    """The text inside Hydra's quotes, or the value itself if it stands bare."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        quote = value[0]
        inner = re.sub(r"(\\+)" + quote, lambda m: "\\" * (len(m[1]) // 2) + quote, value[1:-1])
        return re.sub(r"\\+\Z", lambda m: "\\" * (len(m[0]) // 2), inner)
    return value


def quote(value: str) -> str:
    """`value` as a quoted string of Hydra's grammar: backslashes count only where they precede a quote or
    the end."""
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + "\\'", value)
    tail = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f"'{escaped}{tail}'"


def normalise(overrides: Iterable[str]) -> list[str]:
    """The same overrides in a form that Hydra's grammar always takes; doing it twice changes nothing.

    Values of RAW_TEXT keys become quoted strings. Other values that Hydra can't parse become quoted strings
    too, unless they look like a list, a dict or a call, where the grammar's own error says more.
    """
    return [_normal(text) for text in overrides]


def _normal(text: str) -> str:
    one = split(text)
    if one.value is None:
        return text
    if one.mode == "" and any(one.key == node or one.key.startswith(node + ".") for node in FREE):
        return _normal("++" + text)
    if one.key in RAW_TEXT and one.value not in ("null", ""):
        return f"{one.mode}{one.key}={quote(unquote(one.value))}"
    if one.value and one.value[0] not in "'\"[{(" and not _parses(text):
        return f"{text[: len(text) - len(one.value)]}{quote(one.value)}"
    return text


def _parses(text: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True


def take(overrides: Sequence[str], names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Split off plain options such as run= and which=, as raw text; the last one of a name wins.

    Returns the options found and all other overrides in their order.
    """
    wanted = set(names)
    found: dict[str, str] = {}
    rest = []
    for text in overrides:
        one = split(text)
        if one.key in wanted and one.mode in ("", "++", "+") and one.value is not None:
            found[one.key] = unquote(one.value)
        else:
            rest.append(text)
    return found, rest


def refuse_misspelt_options(overrides: Sequence[str], names: Sequence[str]) -> None:
    """ConfigError if one of the overrides that `take` left over is nearly the name of a plain option."""
    for text in overrides:
        key = split(text).key
        for close in difflib.get_close_matches(key, names, 1, 0.75):
            raise ConfigError(f"unknown key {key}, did you mean '{close}'?")


def flag(options: dict[str, str], name: str) -> bool:
    """A yes-or-no option. ConfigError for anything but true and false."""
    value = options.get(name, "false").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{name}={options[name]} must be true or false")
    return value == "true"


def check_run_name(name: str) -> str:
    """The name itself if it may name a run's folder; ConfigError with the reason if not."""
    if NAME.match(name) and len(name) <= 200:
        return name
    if not name:
        raise ConfigError("run= is empty: give the run a name, for example run=brave-otter")
    if len(name) > 200:
        raise ConfigError(f"run={name[:40]}... is {len(name)} characters long; 200 is the most")
    bad = sorted(set(re.findall(r"[^A-Za-z0-9._-]", name)))
    if bad:
        named = ", ".join(repr(c) for c in bad)
        raise ConfigError(
            f"run={name} holds {named}: a run's name may hold letters A-Z a-z, digits, '.', '_' and '-' "
            "(its folder and its MLflow run are named after it). Where runs are stored is storage.root=..."
        )
    raise ConfigError(f"run={name} begins with '{name[0]}': a run's name begins with a letter or a digit")


def merged(saved: Sequence[str], new: Sequence[str]) -> list[str]:
    """Saved overrides followed by new ones, in a form that composes: a saved `+key` became `++key`, since a
    repeated `+key` is an error; of a repeated group choice or value the last wins."""
    out = []
    for text in [*saved, *new]:
        one = split(text)
        out.append("++" + text[1:] if one.mode == "+" and "@" not in text else text)
    return out


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The runs of a sweep (`-m optim.lr=1e-3,3e-4`): one override list each, in the order Hydra would run
    them.

    Names are not swept over by Hydra, which would read 1e3 as a number: run=a,b names two runs; one name for
    several runs gets a number behind it.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    options, rest = take(overrides, ("run",))
    parsed = OverridesParser.create().parse_overrides(normalise(rest))
    batches = [
        list(job) for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None) for job in batch
    ]
    if "run" not in options:
        return batches
    names = options["run"].split(",")
    if len(names) > 1 and len(batches) > 1:
        raise ConfigError(
            f"run={options['run']} names several runs: sweep over names or over other keys, not both"
        )
    if len(names) > 1:
        batches = [batches[0]] * len(names)
    elif len(batches) > 1:
        names = [f"{names[0]}-{i}" for i in range(len(batches))]
    return [[*job, f"run={quote(name)}"] for job, name in zip(batches, names, strict=True)]
