"""The house rules of the architecture, held against the code itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "ckpt": {"prefect", "hydra", "omegaconf", "mlflow", "training", "flows", "conf"},
    "training": {"prefect", "flows"},
    "flows": {"torch"},
}
MLFLOW_IN_TRAINING = {"training/metrics_sender.py"}
CODE_RUNNING_FORMATS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imported_modules(path: Path) -> set[str]:
    """Return the top-level names of every module that `path` imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources under {package}/"
    return files


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in sources(package)
        if (bad := imported_modules(path) & FORBIDDEN[package])
    }
    assert not wrong


def test_only_the_metrics_sender_of_training_knows_mlflow() -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in sources("training")
        if "mlflow" in imported_modules(path)
    }
    assert knowing <= MLFLOW_IN_TRAINING


@pytest.mark.parametrize("package", FORBIDDEN)
def test_nothing_we_write_or_read_can_run_code(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in sources(package)
        if (bad := imported_modules(path) & CODE_RUNNING_FORMATS)
    }
    assert not wrong


@pytest.mark.parametrize(
    "module", ["flows.train", "flows.resume", "flows.evaluate", "ckpt", "ckpt.writer", "training.launch"]
)
def test_processes_that_need_no_torch_import_none(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; sys.exit('torch' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


def test_no_file_of_the_product_grows_past_what_one_reason_to_change_needs() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for package in FORBIDDEN
        for path in sources(package)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
