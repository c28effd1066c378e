"""The configuration groups of training name what is there and give it only what it takes."""

import inspect
from pathlib import Path

import pytest
import yaml

from training.build import locate

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(
    path
    for group in ("model", "data", "optim", "schedule", "strategy")
    for path in (CONF / group).glob("*.yaml")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_group_fits_its_target(path):
    node = yaml.safe_load(path.read_text())
    target = locate(node.pop("_target_"))
    takes = set(inspect.signature(target).parameters)
    assert set(node) <= takes
    unset = takes - set(node) - {"model", "root"}  # the loop gives the model; the library's place is found
    assert not unset, f"{path} does not show {sorted(unset)}"
