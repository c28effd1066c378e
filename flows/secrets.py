"""Keep secrets out of everything that is saved or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flows.overrides import split

SECRET_KEY = re.compile(r"(token|secret|password|passwd|api_?key|credential)", re.IGNORECASE)
HIDDEN = "(secret)"
_USERINFO = re.compile(r"://[^/@\s:]*:[^/@\s]+@")

# A hidden value shorter than this is hidden only where it stands by itself: "1" occurs in too many texts.
_FINDABLE = 6


def is_secret_key(dotted: str) -> bool:
    """Whether a key's own name (not its node's) says that its value is a secret."""
    return bool(SECRET_KEY.search(dotted.rpartition(".")[2]))


def redact(values: dict[str, Any], hidden: dict[str, str]) -> dict[str, Any]:
    """A copy of `values` without secrets.

    `hidden` maps dotted keys whose value came from the environment to the interpolation they were written as,
    which is kept; values under a secret's name become "(secret)"; a secret that another value contains is
    cut out.
    """
    texts: set[str] = set()
    _collect(values, "", hidden, texts)
    out = _redacted(
        values, "", hidden, sorted((t for t in texts if len(t) >= _FINDABLE), key=len, reverse=True)
    )
    assert isinstance(out, dict)
    return out


def redact_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides that may be saved: a literal secret is left out, and has to be given again on resume."""
    out = []
    for text in overrides:
        one = split(text)
        literal = one.value is not None and "${" not in one.value
        if not (literal and (is_secret_key(one.key) or without_password(text) != text)):
            out.append(text)
    return out


def without_password(text: str) -> str:
    """The text with the `user:password@` of every URL in it hidden."""
    return _USERINFO.sub(f"://{HIDDEN}@", text)


def _collect(node: Any, dotted: str, hidden: dict[str, str], texts: set[str]) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _collect(value, f"{dotted}.{key}" if dotted else str(key), hidden, texts)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            _collect(value, f"{dotted}[{i}]", hidden, texts)
    elif isinstance(node, str) and node and (dotted in hidden or is_secret_key(dotted)):
        texts.add(node)


def _redacted(node: Any, dotted: str, hidden: dict[str, str], texts: list[str]) -> Any:
    if dotted in hidden:
        return hidden[dotted]
    if isinstance(node, dict):
        return {
            k: _redacted(v, f"{dotted}.{k}" if dotted else str(k), hidden, texts) for k, v in node.items()
        }
    if node is not None and node != "" and is_secret_key(dotted) and not isinstance(node, bool):
        return HIDDEN
    if isinstance(node, list):
        return [_redacted(v, f"{dotted}[{i}]", hidden, texts) for i, v in enumerate(node)]
    if isinstance(node, str):
        for text in texts:
            node = node.replace(text, HIDDEN)
        return without_password(node)
    return node
