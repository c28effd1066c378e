"""Following a run's commits costs what is new, not what is there."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ckpt.errors import StorageError
from ckpt.names import MANIFEST, attempt_name
from ckpt.run import open_run
from flows import registry
from flows.commits import Commits

MANY = 1000


class Counting:
    """A store that counts what is asked of it, and fails while told to."""

    def __init__(self, store):
        self.store, self.asked, self.away = store, Counter(), False

    def __getattr__(self, name):
        def ask(*args):
            self.asked[name] += 1
            if self.away:
                raise StorageError("away")
            return getattr(self.store, name)(*args)

        return ask

    def count(self):
        asked, self.asked = dict(self.asked), Counter()
        return asked


@pytest.fixture
def run(tmp_path):
    run = open_run(str(tmp_path / "run"))
    for step in range(MANY):
        commit(run, step)
    return replace(run, store=Counting(run.store))


def commit(run, step, launch=1):
    folder = run.store.path(attempt_name(step, launch, 1, f"{step:08x}"))
    folder.mkdir()
    (folder / MANIFEST).write_text("whole")
    return folder.name


def following(run, monkeypatch, register=True):
    begun = []
    values = {"tracking": {"register": register}}
    plan = SimpleNamespace(run=run, composed=SimpleNamespace(values=values), model_name="m")
    monkeypatch.setattr(Commits, "_begin", lambda self, checkpoint: begun.append(checkpoint.step))
    return Commits(plan, say=lambda line: None), begun


def test_a_second_look_over_many_checkpoints_reads_nothing_and_a_third_only_what_is_new(run, monkeypatch):
    commits, begun = following(run, monkeypatch, register=False)
    commits.look()
    assert begun == list(range(MANY))
    assert run.store.count() == {"list": 1, "size": MANY}
    commits.look(changed=False)
    assert run.store.count() == {}
    commits.look(changed=True)
    assert run.store.count() == {"list": 1}
    commit(replace(run, store=run.store.store), MANY, launch=2)
    commits.look(changed=True)
    assert run.store.count() == {"list": 1, "size": 1}
    assert begun[MANY:] == [MANY]


def test_commits_wait_for_mlflow_without_being_read_again_and_known_ones_are_left_alone(run, monkeypatch):
    known = {attempt_name(step, 1, 1, f"{step:08x}") for step in range(MANY - 2)}
    monkeypatch.setattr(registry, "registered_attempts", lambda *_: known)
    commits, begun = following(run, monkeypatch)
    commits.look()
    run.store.count()
    commits.look()
    assert begun == []
    commits.tracked = object()
    commits.look(changed=False)
    assert begun == [MANY - 2, MANY - 1]
    assert run.store.count() == {"list": 1}


def test_news_that_storage_did_not_tell_are_asked_for_again(run, monkeypatch):
    commits, begun = following(run, monkeypatch, register=False)
    run.store.away = True
    with pytest.raises(StorageError):
        commits.look(changed=True)
    run.store.away = False
    commits.look(changed=False)
    assert len(begun) == MANY
