"""What the documents show runs as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_by_itself_trains_and_goes_on_as_its_page_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert "committed=4" in run(blocks[0], tmp_path)
    assert "begun=0" in run(blocks[0], tmp_path)


def test_every_page_that_the_readme_points_to_is_there() -> None:
    pages = re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text())
    assert pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
