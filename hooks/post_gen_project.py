"""Make the new project whole wherever it was made from: repair links that arrived as text, drop what is the template's own."""

import os
import shutil
import sys
from pathlib import Path

LINKED = ["ckpt", "training", "flows", "conf", "bench", "tests", "docs", ".ci"]
LINKED += ["Makefile", "constraints.txt", "prefect.yaml", "LICENSE"]
TEMPLATE_ONLY = ["tests/template"]
TEMPLATE_DIR = {{ cookiecutter.__template_dir | tojson }}


def template_root() -> Path | None:
    """Return the template's root folder, where the real files are, or None where it is not known."""
    if not TEMPLATE_DIR:
        return None
    root = Path(os.environ.get("PWD", "."), TEMPLATE_DIR)
    return root if (root / "cookiecutter.json").is_file() else None


def is_whole(path: Path) -> bool:
    """A link that arrived as text is a small file which says `../<name>`; a folder or any other file is whole."""
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and not (path.stat().st_size < 200 and path.read_bytes().startswith(b"../"))


def repair(name: str) -> None:
    path = Path(name)
    if is_whole(path):
        return
    root = template_root()
    if root is None or not (root / name).exists():
        sys.exit(
            f"{name} did not arrive: this copy of the template holds no symbolic links. "
            "Clone it with `git clone -c core.symlinks=true` and run cookiecutter on that folder."
        )
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if (root / name).is_dir():
        shutil.copytree(root / name, path)
    else:
        shutil.copy2(root / name, path)


for linked in LINKED:
    repair(linked)
for name in TEMPLATE_ONLY:
    shutil.rmtree(name, ignore_errors=True)
for cache in list(Path().rglob("__pycache__")):
    shutil.rmtree(cache, ignore_errors=True)
for local in Path("conf/local").glob("*.yaml"):
    local.unlink()
