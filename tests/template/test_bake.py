"""A project made from the template is whole, is its own, and runs."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLUG = "{{cookiecutter.project_slug}}"
TEMPLATE_ONLY = {SLUG, "hooks", "cookiecutter.json"}


@pytest.fixture(scope="module")
def bake(tmp_path_factory: pytest.TempPathFactory):
    cookiecutter = pytest.importorskip("cookiecutter.main").cookiecutter
    home = tmp_path_factory.mktemp("cookiecutter")
    settings = home / "rc.yaml"
    settings.write_text(f"cookiecutters_dir: {home}/templates\nreplay_dir: {home}/replay\n")

    def make(**answers: str) -> Path:
        return Path(
            cookiecutter(
                str(ROOT),
                no_input=True,
                output_dir=str(tmp_path_factory.mktemp("projects")),
                config_file=str(settings),
                extra_context=answers,
            )
        )

    return make


@pytest.fixture(scope="module")
def project(bake) -> Path:
    return bake(project_name="Zebra Finch", author="Ada Lovelace")


def tracked_names() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split("/")[0] for name in listed.stdout.split("\0") if name}


def test_every_top_level_entry_is_part_of_a_new_project_or_the_templates_own():
    linked = {path.name for path in (ROOT / SLUG).iterdir()}
    assert tracked_names() - linked - TEMPLATE_ONLY == set()


def test_what_git_ignores_is_the_same_in_a_new_project(project: Path):
    assert (project / ".gitignore").read_bytes() == (ROOT / ".gitignore").read_bytes()


@pytest.mark.parametrize("folder", ["ckpt", "training", "flows", "conf", "bench", "docs"])
def test_the_code_of_a_new_project_is_the_templates_own_byte_for_byte(project: Path, folder: str):
    ours = {
        p.relative_to(ROOT)
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    ours -= {p for p in ours if p.match("conf/local/*.yaml")}
    theirs = {p.relative_to(project) for p in (project / folder).rglob("*") if p.is_file()}
    assert theirs == ours
    different = [str(p) for p in ours if not filecmp.cmp(ROOT / p, project / p, shallow=False)]
    assert not different


def test_the_settings_of_a_new_project_differ_from_the_templates_in_its_identity_alone(project: Path):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    theirs = tomllib.loads((project / "pyproject.toml").read_text())
    assert theirs["project"]["name"] == "zebra-finch"
    assert theirs["project"].pop("authors") == [{"name": "Ada Lovelace"}]
    for key in ("name", "description"):
        ours["project"].pop(key), theirs["project"].pop(key)
    assert ours["tool"]["ruff"].pop("extend-exclude") == ["*project_slug*", "hooks"]
    assert theirs == ours


def test_a_new_project_bears_its_own_name_alone(project: Path):
    leaks = [
        str(path.relative_to(project))
        for path in project.rglob("*")
        if path.is_file() and "pitstop" in path.read_bytes().decode("utf-8", "replace").lower()
    ]
    assert not leaks
    assert "Zebra Finch" in (project / "README.md").read_text()


def test_an_impossible_slug_is_refused_and_leaves_nothing(bake, tmp_path_factory):
    from cookiecutter.exceptions import FailedHookException

    before = set(tmp_path_factory.getbasetemp().rglob("9lives*"))
    with pytest.raises(FailedHookException):
        bake(project_name="9lives!", project_slug="9lives!")
    assert set(tmp_path_factory.getbasetemp().rglob("9lives*")) == before


def test_a_new_project_trains_at_once(project: Path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {"PREFECT_HOME": str(project / "runs/.prefect"), "DO_NOT_TRACK": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", "debug=smoke", "run=first"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "ckpt", "ls", "runs/first"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert listed.returncode == 0 and "step" in listed.stdout.lower(), listed.stdout + listed.stderr
    assert (project / "runs" / "first" / "run.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_make_run_of_a_new_project_tells_the_whole_story(project: Path):
    done = subprocess.run(["make", "run"], cwd=project, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "equal bit for bit" in done.stdout
