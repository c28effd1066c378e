"""What tests of the engine share as fixtures."""

import json

import pytest

from ckpt import faults


@pytest.fixture
def faults_on(monkeypatch):
    """Lets fault rules strike in this process and in the writers that it starts from now on."""

    def turn_on(*rules):
        text = json.dumps(rules)
        monkeypatch.setenv(faults.VARIABLE, text)
        monkeypatch.setattr(faults, "_rules", faults.parse(text))

    return turn_on
