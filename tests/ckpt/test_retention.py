import errno
import json
import os
import random
import shutil
import threading
import time
from types import SimpleNamespace

import pytest

import ckpt
from ckpt import discover, faults
from ckpt.commit import posthumous
from ckpt.discover import committed
from ckpt.errors import Corrupt, Fenced, NotCommitted, StateError
from ckpt.history import History
from ckpt.names import DOOMED, MANIFEST, part_name, shard_name
from ckpt.pins import pin, pinned, pins, unpin
from ckpt.policies import KeepBest, KeepLast
from ckpt.retention import doomed, orphans, prune
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    run = making.run_at(tmp_path / "run")
    making.launch(run, 1, fresh=True)
    return run


def prune_by(run, keep, launch=1):
    history = [item.fact for item in committed(run)]
    return prune(run.store, doomed(history, keep, pinned(run.store)), launch)


def steps(run):
    return [item.step for item in ckpt.checkpoints(run.uri)]


def test_h1_the_newest_are_kept_by_number(run):
    for step in (8, 9, 10, 11):
        making.checkpoint(run, step)
    history = [item.fact for item in committed(run)]
    assert doomed(history, KeepLast(-1), set()) == doomed(history, None, set()) == []
    with pytest.raises(ValueError, match="keep all"):
        KeepLast(0)
    assert prune_by(run, KeepLast(2)) == []
    assert steps(run) == [11, 10]


@pytest.mark.parametrize("order", ["equal", "reversed", "shuffled"])
def test_h3_file_times_mean_nothing(run, order):
    for number, step in enumerate((5, 10, 15, 20), start=1):
        making.checkpoint(run, step)
        paths = sorted(run.store.path("").rglob("*"))
        for age, path in enumerate(paths):
            when = {
                "equal": 10**9,
                "reversed": 2 * 10**9 - age,
                "shuffled": random.Random(age).randrange(10**9),
            }[order]
            os.utime(path, (when, when))
        assert prune_by(run, KeepLast(2)) == []
        assert steps(run) == [20, 15, 10, 5][4 - number :][:2]


def test_h5_retention_touches_its_own_run_only(tmp_path):
    a, b = making.run_at(tmp_path / "a"), making.run_at(tmp_path / "a-2")
    for run in (a, b):
        making.launch(run, 1)
    for step in (5, 10, 15):
        making.checkpoint(a, step)
    before = making.tree_digest(tmp_path / "a")
    shutil.copytree(tmp_path / "a" / committed(a)[0].attempt, tmp_path / "a-2" / committed(a)[0].attempt)
    linked = committed(a)[1].attempt
    (tmp_path / "a-2" / linked).symlink_to(tmp_path / "a" / linked)
    for step in (20, 25):
        making.checkpoint(b, step)
    names = [item.attempt for item in committed(a)]
    asked = [*names, f"../a/{names[0]}", "../a", "", ".", "run.json", "launches"]
    warnings = prune(b.store, asked, 1)
    assert making.tree_digest(tmp_path / "a") == before
    assert any("belongs to the run" in text for text in warnings)
    assert (tmp_path / "a-2" / names[0]).is_dir() and (tmp_path / "a-2" / linked).is_symlink()


def test_the_newest_valid_is_never_deleted_whatever_is_asked(run):
    made = [making.checkpoint(run, step) for step in (5, 10, 15)]
    os.truncate(run.store.path(f"{made[2].attempt}/{shard_name(0)}"), 10)
    warnings = prune(run.store, [item.attempt for item in made], 1)
    assert steps(run) == [10]
    assert any("newest valid" in text for text in warnings)


def test_a_damaged_manifest_is_never_deleted(run):
    made = [making.checkpoint(run, step) for step in (5, 10)]
    making.flip(run.store.path(f"{made[0].attempt}/{MANIFEST}"), 40)
    assert any("damaged" in text for text in prune(run.store, [made[0].attempt], 1))
    assert run.store.size(f"{made[0].attempt}/{shard_name(0)}")


def test_if_none_is_valid_nothing_is_deleted(run):
    for step in (5, 10):
        os.truncate(run.store.path(f"{making.checkpoint(run, step).attempt}/{shard_name(0)}"), 1)
    with pytest.raises(Corrupt):
        prune(run.store, [item.attempt for item in committed(run)], 1)
    assert steps(run) == [10, 5]


def test_a_run_that_keeps_all_never_reads_its_history(run, monkeypatch):
    looked = []
    monkeypatch.setattr(discover, "checkpoints", lambda uri: looked.append(uri) or [])
    for keep, looks in ((KeepLast(None), 0), (KeepLast(-1), 0), (KeepLast(2), 1)):
        looked.clear()
        history = History(run, 1, keep, say=pytest.fail)
        for step in (1, 2):
            assert history.committed(SimpleNamespace(name=f"s{step}", step=step, metrics={})) == []
        assert (history.last.step, len(looked)) == (2, looks)


def test_an_overtaken_launch_can_not_prune(run):
    made = [making.checkpoint(run, step) for step in (5, 10)]
    making.launch(run, 2)
    with pytest.raises(Fenced):
        prune(run.store, [made[0].attempt], 1)
    assert steps(run) == [10, 5]


def test_pinned_checkpoints_stay_until_let_go(run):
    made = {step: making.checkpoint(run, step) for step in (5, 10, 15)}
    pin(run, "champion", made[5])
    assert prune_by(run, KeepLast(1)) == [] and steps(run) == [15, 5]
    warnings = prune(run.store, [made[5].attempt], 1)
    assert steps(run) == [15, 5] and "pinned" in warnings[0]
    assert run.store.size(f"{made[5].attempt}/{DOOMED}") is None
    pin(run, "champion", made[15])
    assert [(item.name, item.step) for item in pins(run)] == [("champion", 15)]
    assert prune_by(run, KeepLast(1)) == [] and steps(run) == [15]
    assert unpin(run, "champion") and not unpin(run, "champion") and pins(run) == []


def test_a_lease_ends_at_its_deadline(run, monkeypatch):
    made = [making.checkpoint(run, step) for step in (5, 10)]
    pin(run, "reader", made[0], deadline_s=100)
    assert prune_by(run, KeepLast(1)) == [] and steps(run) == [10, 5]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert pins(run)[0].expired and pinned(run.store) == set()
    prune_by(run, KeepLast(1))
    assert steps(run) == [10]


def test_what_can_not_be_pinned_is_refused_and_leaves_no_pin(run, tmp_path):
    made = making.checkpoint(run, 5)
    uncommitted = making.write_attempt(run, 10)
    with pytest.raises(NotCommitted, match="not committed"):
        pin(run, "x", ckpt.checkpoint.Checkpoint(run.uri, uncommitted, 10, 1))
    for name in ("", "../x", "a b", ".hidden", "a/b", "x" * 300):
        with pytest.raises(StateError, match="letters, digits"):
            pin(run, name, made)
    other = making.run_at(tmp_path / "other")
    with pytest.raises(StateError, match="not a checkpoint of"):
        pin(other, "x", made)
    assert pins(run) == [] == pins(other)


def test_a_failed_move_of_a_pin_leaves_it_where_it_was(run):
    made = making.checkpoint(run, 5)
    pin(run, "x", made)
    gone = ckpt.checkpoint.Checkpoint(run.uri, "step-000000009-00001-abcd", 9, 1)
    run.store.make_dir(gone.attempt)
    with pytest.raises(NotCommitted):
        pin(run, "x", gone)
    assert pins(run)[0].attempt == made.attempt


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"attempt":"../x","deadline":null}', b'{"attempt":3}', b"[" * 10_000]
)
def test_a_pin_that_can_not_be_read_stops_pruning(run, data):
    made = [making.checkpoint(run, step) for step in (5, 10)]
    run.store.make_dir("pins")
    run.store.path("pins/x.json").write_bytes(data)
    warnings = prune(run.store, [made[0].attempt], 1)
    assert "pin x" in warnings[0] and steps(run) == [10, 5]
    assert run.store.size(f"{made[0].attempt}/{DOOMED}") is None


def test_of_a_pruner_and_a_pinner_at_once_one_gives_way_and_a_pinned_one_is_whole(run):
    newest = making.checkpoint(run, 10**6)
    for step in range(1, 41):
        made = making.checkpoint(run, step)
        barrier, held = threading.Barrier(2), []

        def hold(made=made, barrier=barrier, held=held):
            barrier.wait(10)
            try:
                held.append(pin(run, "lease", made))
            except NotCommitted:
                pass

        thread = threading.Thread(target=hold)
        thread.start()
        barrier.wait(10)
        prune(run.store, [made.attempt], 1)
        thread.join(30)
        if held:
            assert ckpt.verify(made).ok
        unpin(run, "lease")
    assert ckpt.latest_valid(run.uri) == newest


def test_the_manifest_goes_first_then_what_a_commit_would_need(run, monkeypatch):
    made = [making.checkpoint(run, step, world_size=2) for step in (5, 10)]
    gone = []
    real = os.unlink
    from pathlib import Path

    monkeypatch.setattr(
        Path, "unlink", lambda self, **kw: gone.append(self.name) or real(self) if self.exists() else None
    )
    assert prune(run.store, [made[0].attempt], 1) == []
    kept = [name for name in gone if not name.startswith(".tmp-")]
    assert kept[0] == MANIFEST and set(kept[1:]) == {part_name(0), part_name(1)}
    assert not run.store.path(made[0].attempt).exists()


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_deletion_cut_short_is_neither_a_checkpoint_nor_committed_again_and_is_cleaned_up(
    run, monkeypatch, nth
):
    made = [making.checkpoint(run, step, world_size=2) for step in (5, 10)]
    rule = [{"match": f"delete:.*{made[0].attempt}", "nth": nth, "do": "raise", "errno": errno.EIO}]
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(rule)))
    warnings = prune(run.store, [made[0].attempt], 1)
    assert len(warnings) == 1 and "step-000000005" in warnings[0]
    monkeypatch.setattr(faults, "_rules", [])
    if nth > 1:
        assert steps(run) == [10]
    assert posthumous(run, 2) == [] and ckpt.latest_valid(run.uri).step == 10
    assert prune(run.store, [made[0].attempt], 1) == []
    assert not run.store.path(made[0].attempt).exists()


def test_orphans_of_older_launches_are_cleaned_and_those_in_flight_are_not(run):
    committed_one = making.checkpoint(run, 5)
    old = making.write_attempt(run, 10, 1, parts=False)
    making.launch(run, 2)
    own = making.write_attempt(run, 15, 2, parts=False)
    assert orphans(run, 2) == [old]
    warnings = prune(run.store, [old, own, committed_one.attempt], 2)
    assert not run.store.path(old).exists() and run.store.path(own).exists() and steps(run) == [5]
    assert any(own in text and "still be writing" in text for text in warnings)


def test_j1_keeping_the_best_ignores_nan_and_keeps_the_newest_too(run):
    for step, loss in enumerate([0.5, float("nan"), 0.4, float("-inf"), 0.9], start=1):
        making.checkpoint(run, step, metrics={"loss": loss})
    assert prune_by(run, KeepBest("loss", "min")) == []
    assert steps(run) == [5, 3]


def test_an_abandoned_branch_does_not_take_the_places_of_the_line(run):
    one = {step: making.checkpoint(run, step) for step in (10, 20, 30)}
    making.launch(run, 2, parent=one[10])
    making.checkpoint(run, 15, 2)
    assert prune_by(run, KeepLast(2), launch=2) == []
    assert steps(run) == [15, 10]


def test_names_of_attempts_that_are_gone_are_no_warning(run):
    making.checkpoint(run, 5)
    assert prune(run.store, ["step-000000001-00001-abcd"], 1) == []
