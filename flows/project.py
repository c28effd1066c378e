"""Where this project is and what it is called."""

from __future__ import annotations

import os
import tomllib
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def project_dir() -> Path:
    """The folder that holds pyproject.toml and the packages. `CKPT_HOME` moves what is stored under it."""
    home = os.environ.get("CKPT_HOME")
    return Path(home).expanduser().resolve() if home else source_dir()


def source_dir() -> Path:
    """The folder that holds the packages."""
    return Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def project_name() -> str:
    """The name in pyproject.toml, or the folder's name where there is none."""
    page = source_dir() / "pyproject.toml"
    try:
        return str(tomllib.loads(page.read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return source_dir().name


def shown(path: str | Path) -> str:
    """A path as a person would type it: relative to where they are, if it is below that. Any other address
    stays as it is."""
    full = Path(path)
    if not full.is_absolute():
        return str(path)
    try:
        return str(full.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(full)
