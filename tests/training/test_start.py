"""What a rank does before it trains: signals, imports, building objects from the configuration."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from training.build import build, locate
from training.stop import SIGNALS, Stop, StopRequested


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made = Stop()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_stop_signal_wakes_a_blocking_wait(stop, number):
    read, write = os.pipe()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(StopRequested), stop.interruptible():
        os.read(read, 1)
    assert stop.reason == f"signal {number.name}"
    os.close(read)
    os.close(write)


def test_a_request_from_a_thread_wakes_the_main_thread(stop):
    threading.Timer(0.05, stop.request, ("the flow asked",)).start()
    with pytest.raises(StopRequested), stop.interruptible():
        time.sleep(30)
    assert stop.reason == "the flow asked"


def test_outside_a_wait_a_signal_only_takes_note_and_the_first_counts(stop):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert stop.reason == "signal SIGTERM"
    with pytest.raises(StopRequested), stop.interruptible():
        pytest.fail("entered a wait although a stop was asked for")


def test_an_optimizer_is_built_without_importing_the_compiler():
    code = """
import sys, torch
from training.quick import spare_the_compiler
spare_the_compiler()
from training.optim import adamw
layer = torch.nn.Linear(2, 2)
optimizer = adamw(layer)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step(); optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
torch.compile(layer, backend="eager")(torch.ones(1, 2)).sum().backward()
optimizer.step(); optimizer.zero_grad()
print("good")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "good\n", done.stderr


def test_targets_are_called_with_nested_targets_built_first():
    made = build(
        {"_target_": "builtins.dict", "inner": {"_target_": "builtins.list"}, "items_": [1, {"a": 2}]}
    )
    assert made == {"inner": [], "items_": [1, {"a": 2}]}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("training.optim.adamx", "training.optim has no 'adamx'"),
        ("nowhere.at.all", "no module 'nowhere'"),
        ("training.nothing.adamw", "training has no 'nothing'"),
    ],
)
def test_a_target_that_is_not_there_is_named(target, text):
    with pytest.raises(ImportError, match=text):
        locate(target)
