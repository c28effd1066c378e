import errno
import json
import logging
import os
import time
from collections import Counter

import pytest

import ckpt
from ckpt import faults
from ckpt.discover import best, candidates, committed, find
from ckpt.errors import Corrupt, NewerFormat, NotCommitted, StateError, StorageError
from ckpt.names import MANIFEST, attempt_name, part_name, shard_name
from ckpt.pins import pin
from ckpt.stores.folder import FolderStore
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    run = making.run_at(tmp_path / "run")
    making.launch(run, 1, fresh=True)
    return run


def steps(found):
    return [(item.launch, item.step, item.abandoned) for item in found]


def damage(run, made, how):
    shard, manifest = (run.store.path(f"{made.attempt}/{name}") for name in (shard_name(0), MANIFEST))
    if how == "shard missing":
        shard.unlink()
    elif how == "shard cut":
        os.truncate(shard, shard.stat().st_size - 1)
    elif how == "manifest cut":
        os.truncate(manifest, manifest.stat().st_size - 5)
    elif how == "manifest changed":
        making.flip(manifest, 30)
    elif how == "shard changed":
        making.flip(shard)
    elif how == "manifest of another":
        other = making.checkpoint(run, 1, 1)
        manifest.write_bytes(run.store.read(f"{other.attempt}/{MANIFEST}"))


QUICK = ["shard missing", "shard cut", "manifest cut", "manifest changed", "manifest of another"]


@pytest.mark.parametrize("how", [*QUICK, "shard changed"])
def test_a1_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(run, how, caplog):
    good, bad = making.checkpoint(run, 5), making.checkpoint(run, 10)
    damage(run, bad, how)
    before = making.tree_digest(run.store.path(""))
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert ckpt.latest_valid(run.uri).attempt == good.attempt
        if how in QUICK:
            assert ckpt.latest_valid(run.uri, verify="quick").attempt == good.attempt
    assert any(bad.attempt in record.getMessage() for record in caplog.records)
    assert making.tree_digest(run.store.path("")) == before, "what fails is skipped, never deleted"


@pytest.mark.parametrize("left", ["shard only", "shard and part", "empty folder", "temporary manifest"])
def test_a1_a_killed_save_is_never_taken_for_a_checkpoint_and_is_named(run, left):
    good = making.checkpoint(run, 5)
    killed = making.write_attempt(run, 10, parts=left != "shard only")
    if left == "empty folder":
        run.store.delete_tree(killed)
        run.store.make_dir(killed)
    if left == "temporary manifest":
        run.store.path(f"{killed}/.tmp-0011").write_bytes(b"{}")
    said = []
    assert ckpt.latest_valid(run.uri, say=said.append).attempt == good.attempt
    assert said == [f"passing over {killed}: it is not committed (a save killed or still under way)"]


def test_candidates_without_a_valid_one_are_an_error_and_not_a_fresh_start(run):
    for step in (5, 10):
        damage(run, making.checkpoint(run, step), "shard cut")
    with pytest.raises(Corrupt, match=r"step-000000010.*step-000000005"):
        ckpt.latest_valid(run.uri, verify="quick", say=lambda _: None)


def test_a_truly_empty_run_has_no_latest(run):
    assert ckpt.latest_valid(run.uri) is None and ckpt.checkpoints(run.uri) == []
    making.write_attempt(run, 5)
    assert ckpt.latest_valid(run.uri, say=lambda _: None) is None


def test_a_run_that_is_not_there_is_an_error(tmp_path):
    for look in (ckpt.latest_valid, ckpt.checkpoints):
        with pytest.raises(NotCommitted, match="there is no run"):
            look(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_h1_the_newest_is_found_by_number_not_by_text_or_time(run):
    made = {step: making.checkpoint(run, step) for step in (100, 8, 9, 10, 11, 99)}
    for age, step in enumerate(made):
        os.utime(run.store.path(made[step].attempt), (10**9 + age, 10**9 + age))
        os.utime(run.store.path(f"{made[step].attempt}/{MANIFEST}"), (10**9 + age, 10**9 + age))
    assert [item.step for item in ckpt.checkpoints(run.uri)] == [100, 99, 11, 10, 9, 8]
    assert ckpt.latest_valid(run.uri).step == 100


def test_h1_clocks_that_go_back_change_nothing(run):
    making.checkpoint(run, 5, created="2030-01-01T00:00:00+00:00")
    making.checkpoint(run, 10, created="1999-01-01T00:00:00+00:00")
    assert ckpt.latest_valid(run.uri).step == 10


def test_abandoned_branches_stay_visible_marked_and_are_never_the_latest(run):
    one = {step: making.checkpoint(run, step) for step in (10, 20, 30)}
    making.launch(run, 2, parent=one[10])
    making.checkpoint(run, 15, 2)
    expected = [(2, 15, False), (1, 10, False), (1, 30, True), (1, 20, True)]
    assert steps(ckpt.checkpoints(run.uri)) == expected
    assert ckpt.latest_valid(run.uri).step == 15
    damage(run, ckpt.checkpoints(run.uri)[0], "shard cut")
    assert ckpt.latest_valid(run.uri, say=lambda _: None).step == 10


def test_i5_a_neighbour_whose_name_goes_on_is_another_run(tmp_path):
    one, ten = making.run_at(tmp_path / "exp-1"), making.run_at(tmp_path / "exp-10")
    making.checkpoint(one, 5)
    making.checkpoint(ten, 50)
    assert ckpt.latest_valid(tmp_path / "exp-1").step == 5
    before = making.tree_digest(tmp_path / "exp-10")
    from ckpt.store import open_store

    open_store(tmp_path).delete_tree("exp-1")
    assert making.tree_digest(tmp_path / "exp-10") == before


def test_a_checkpoint_from_another_run_is_not_taken(run, tmp_path):
    stranger = making.run_at(tmp_path / "other")
    foreign = making.checkpoint(stranger, 50)
    good = making.checkpoint(run, 5)
    os.rename(stranger.store.path(foreign.attempt), run.store.path(foreign.attempt))
    said = []
    assert ckpt.latest_valid(run.uri, say=said.append).attempt == good.attempt
    assert "wrong place" in said[0]


def test_a_checkpoint_of_a_newer_format_stops_the_search_rather_than_losing_it(run):
    making.checkpoint(run, 5)
    newer = making.checkpoint(run, 10)
    path = run.store.path(f"{newer.attempt}/{MANIFEST}")
    path.write_bytes(making.resealed(path.read_bytes(), lambda body: body.update(format=2)))
    with pytest.raises(NewerFormat, match="update"):
        ckpt.latest_valid(run.uri)


def test_a_storage_that_stumbles_does_not_cost_the_newest_checkpoint(run, monkeypatch):
    making.checkpoint(run, 5)
    newest = making.checkpoint(run, 10)
    rule = [{"match": f"read:.*{newest.attempt}", "nth": 1, "do": "raise", "errno": errno.EIO}]
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(rule)))
    assert ckpt.latest_valid(run.uri).attempt == newest.attempt
    rule[0]["nth"] = 0
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(rule)))
    said = []
    assert ckpt.latest_valid(run.uri, say=said.append).step == 5
    assert newest.attempt in said[0]


def test_a_listing_that_fails_is_an_error_and_not_an_empty_run(run, monkeypatch):
    making.checkpoint(run, 5)
    rule = [{"match": "list:.*run$", "do": "raise", "errno": errno.EACCES}]
    monkeypatch.setattr(faults, "_rules", faults.parse(json.dumps(rule)))
    for look in (ckpt.latest_valid, ckpt.checkpoints):
        with pytest.raises(StorageError, match="permissions"):
            look(run.uri)


def many(run, count):
    """Committed checkpoints at steps 1 to `count`, as fast as they can be made."""
    from ckpt.sealed import seal

    model = making.checkpoint(run, 1)
    body = json.loads(model.manifest.raw)
    body.pop("~seal")
    shard = run.store.path(f"{model.attempt}/{shard_name(0)}")
    for step in range(2, count + 1):
        name = attempt_name(step, 1)
        folder = run.store.path(name)
        folder.mkdir()
        (folder / MANIFEST).write_bytes(seal({**body, "attempt": name, "step": step}))
        os.link(shard, folder / shard_name(0))


def test_the_latest_of_five_thousand_is_found_in_a_second_by_one_listing_and_one_read(run, monkeypatch):
    many(run, 5000)
    start = time.monotonic()
    assert ckpt.latest_valid(run.uri, verify="quick").step == 5000
    assert time.monotonic() - start < 1
    calls = Counter()
    for name in ("read", "list", "size"):
        real = getattr(FolderStore, name)

        def counted(self, *args, _real=real, _name=name, **kwargs):
            calls[_name] += 1
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(FolderStore, name, counted)
    assert ckpt.latest_valid(run.uri, verify="quick").step == 5000
    # run.json and the manifest; the run and its launches; the one shard.
    assert calls == {"read": 2, "list": 2, "size": 1}
    assert len(ckpt.checkpoints(run.uri)) == 5000


def test_candidates_are_read_only_when_asked(run):
    for step in (5, 10):
        making.checkpoint(run, step)
    first = next(candidates(run))
    assert first.step == 10 and "manifest" not in first.__dict__
    assert first.manifest.step == 10


def test_one_checkpoint_is_found_by_step_name_tag_or_latest(run):
    made = {step: making.checkpoint(run, step) for step in (5, 10, 30)}
    making.launch(run, 2, parent=made[10])
    again = making.checkpoint(run, 30, 2)
    pin(run, "keeper", made[5])
    assert find(run, "latest") == again
    assert find(run, "step:30") == again
    assert find(run, "step:10") == made[10]
    assert find(run, made[30].attempt).abandoned
    assert find(run, "tag:keeper") == made[5]
    for which, reason in [
        ("step:7", "30, 10, 5"),
        ("tag:none", "keeper"),
        (attempt_name(5, 1), "no committed checkpoint"),
    ]:
        with pytest.raises(NotCommitted, match=reason):
            find(run, which)
    for which in (
        "",
        "newest",
        "step:",
        "step:x",
        "step:-1",
        "best",
        "best:loss",
        "best:loss:maximum",
        "tag:",
        "tag:../x",
    ):
        with pytest.raises(StateError):
            find(run, which)


def test_j1_nan_infinite_and_missing_values_never_become_best_and_never_block(run):
    for step, loss in enumerate([float("nan"), 0.5, float("nan"), 0.4, float("-inf"), None], start=1):
        making.checkpoint(run, step, metrics={} if loss is None else {"loss": loss})
    assert find(run, "best:loss:min").step == 4
    assert find(run, "best:loss:max").step == 2
    with pytest.raises(NotCommitted, match=r"no best checkpoint by 'acc'.*loss"):
        find(run, "best:acc:max")


def test_j1_all_nan_means_no_best(run):
    making.checkpoint(run, 1, metrics={"loss": float("nan")})
    with pytest.raises(NotCommitted, match="none has a finite value"):
        find(run, "best:loss:min")


def test_j3_the_direction_of_best_has_to_be_said(run):
    making.checkpoint(run, 1, metrics={"eval_set-b_loss": 1.0})
    for which in ("best:eval_set-b_loss", "best:eval_set-b_loss:maximum", "best::min"):
        with pytest.raises(StateError, match="low or high"):
            find(run, which)
    with pytest.raises(StateError, match="'min' or 'max'"):
        best(committed(run), "eval_set-b_loss", "maximum")


def test_best_is_over_the_whole_line_of_equal_ones_the_newest_and_never_abandoned(run):
    made = {s: making.checkpoint(run, s, metrics={"loss": v}) for s, v in [(5, 0.3), (10, 0.3), (20, 0.1)]}
    making.launch(run, 2, parent=made[10])
    making.checkpoint(run, 15, 2, metrics={"loss": 0.9})
    assert find(run, "best:loss:min").step == 10
    damage(run, made[10], "manifest cut")
    assert find(run, "best:loss:min").step == 5


def test_a_metric_named_with_colons_can_be_best(run):
    making.checkpoint(run, 5, metrics={"val:loss": 1})
    assert find(run, "best:val:loss:min").step == 5


def test_what_a_checkpoint_tells_of_itself(run):
    made = making.checkpoint(run, 5, metrics={"loss": 0.5})
    found = ckpt.checkpoints(run.uri)[0]
    assert found == made and found.metrics == {"loss": 0.5}
    assert found.committed_at.isoformat() == making.CREATED
    assert found.fact.attempt == made.attempt and found.fact.metrics == {"loss": 0.5}
    run.store.delete(f"{made.attempt}/{part_name(0)}")
    assert ckpt.latest_valid(run.uri) == made, "the parts are not needed once committed"
