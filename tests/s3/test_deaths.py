"""Whatever dies while a save goes into a bucket, what counts is whole."""

from __future__ import annotations

import os
import signal

import pytest

from ckpt.commit import posthumous
from ckpt.discover import committed, latest_valid
from ckpt.launches import begin_launch
from ckpt.run import open_run
from tests.ckpt.writing import PATIENCE_S, Trainer, gone, wait_until
from tests.s3 import proxy as faults

SHARD = r"rank-00000\.safetensors$"


@pytest.fixture
def run(proxied_env, s3_root):
    made = open_run(f"{s3_root}/run")
    begin_launch(made, owner="tests", config=None, say=print)
    return made


@pytest.fixture
def trainer(run):
    made = Trainer(run, mib=40)
    yield made
    made.clean_up()


def test_an_orphaned_writer_finishes_the_upload_and_commits(run, trainer, proxy):
    proxy.inject(faults.SLOW, "part", key=SHARD, seconds=0.5)
    attempt = trainer.do("begin", 1)["attempt"]
    trainer.do("stage", 1.0)
    trainer.do("seal")
    wait_until(lambda: proxy.seen("part"), "the upload has begun")
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.process.wait(PATIENCE_S)
    assert latest_valid(run.uri) is None, "it was durable before the kill: nothing is tested"
    wait_until(lambda: gone(trainer.writer), "the orphaned writer has ended")
    found = latest_valid(run.uri, verify="full")
    assert found is not None and found.attempt == attempt


def test_a_save_whose_trainer_and_writer_die_in_the_upload_is_no_checkpoint_and_leaves_nothing(
    run, trainer, proxy
):
    first = trainer.do("save", 1)["attempt"]
    rule = proxy.inject(faults.HANG, "complete", key=SHARD)
    left = trainer.do("begin", 2)["attempt"]
    trainer.do("stage", 1.0)
    trainer.do("seal")
    wait_until(lambda: rule.hits, "all parts are up and the upload is to be completed")
    for pid in (trainer.writer, trainer.pid):
        os.kill(pid, signal.SIGKILL)
    trainer.process.wait(PATIENCE_S)
    proxy.clear()
    again = open_run(run.uri, takeover=True)
    launch = begin_launch(again, owner="tests", config=None, say=print)
    assert posthumous(again, launch.number) == []
    assert [each.attempt for each in committed(again)] == [first]
    assert not [each for each in run.store.list(left) if each.name.endswith(".safetensors")]
    assert proxy.seen("abort", key=SHARD)
