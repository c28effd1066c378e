import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ckpt import faults


@pytest.fixture
def rules(monkeypatch):
    def load(*items) -> None:
        monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(items)))

    return load


def test_a_rule_strikes_at_its_match_only(rules, tmp_path):
    rules({"match": r"^trainer:fsync:.*shard", "nth": 2, "do": "raise", "errno": 28})
    faults.point("fsync", "a/manifest")
    faults.point("pwrite", "a/shard")
    faults.point("fsync", "a/shard")
    with pytest.raises(OSError) as caught:
        faults.point("fsync", tmp_path / "shard")
    assert caught.value.errno == 28
    faults.point("fsync", "a/shard")


def test_a_rule_without_a_number_strikes_every_time(rules):
    rules({"match": "list:", "do": "raise"})
    for _ in range(3):
        with pytest.raises(OSError):
            faults.point("list", "x")


def test_a_delay_delays_and_a_cut_halves_without_an_error(rules, tmp_path):
    rules({"match": "slow:", "do": "delay", "seconds": 0.05}, {"match": "write:", "do": "cut"})
    begun = time.monotonic()
    faults.point("slow", "x")
    assert time.monotonic() - begun >= 0.05
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    faults.point("write", file)
    assert file.read_bytes() == b"1234"
    faults.point("write", "some/key", file)
    assert file.read_bytes() == b"12"


def test_rules_come_from_the_environment_and_can_kill():
    script = (
        "from ckpt import faults; faults.name_process('writer'); faults.point('commit', 'x'); print('alive')"
    )
    rule = [{"match": "^writer:commit:", "nth": 1, "do": "kill"}]
    for text, code, out in ((json.dumps(rule), -signal.SIGKILL, ""), ("", 0, "alive\n")):
        env = {**os.environ, "CKPT_FAULTS": text}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, out)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "{}",
        "[1]",
        '[{"match": "x"}]',
        '[{"match": "x", "do": "explode"}]',
        '[{"match": "x", "do": "kill", "more": 1}]',
    ],
)
def test_malformed_rules_are_refused_loudly(text):
    with pytest.raises(ValueError, match="CKPT_FAULTS"):
        faults.parse(text)
