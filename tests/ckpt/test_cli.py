import json
import os
import subprocess
import sys

import pytest

from ckpt import cli
from ckpt.names import MANIFEST, part_name, shard_name
from ckpt.pins import pins
from tests.ckpt import making


@pytest.fixture
def run(tmp_path):
    run = making.run_at(tmp_path / "a b" / "run=1")
    making.launch(run, 1, fresh=True)
    return run


@pytest.fixture
def call(capsys):
    def call(*args):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def as_json(call, *args, code=0):
    found, out, _ = call(*args, "--json")
    assert found == code
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def branched(run):
    one = {step: making.checkpoint(run, step, metrics={"loss": 1 / step}) for step in (10, 20)}
    making.launch(run, 2, parent=one[10])
    return one[10], one[20], making.checkpoint(run, 15, 2, metrics={"loss": float("nan")})


def test_ls_shows_order_tags_abandoned_branches_and_uncommitted_attempts(run, call):
    ten, twenty, fifteen = branched(run)
    killed = making.write_attempt(run, 18, 2, parts=False)
    call("tag", ten.uri, "keeper")
    code, out, _ = call("ls", run.uri)
    lines = out.splitlines()
    assert code == 0 and run.id in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["15", "10", "20", "18"]
    assert fifteen.attempt in lines[2] and "abandoned" not in lines[2]
    assert "[keeper]" in lines[3] and lines[4].endswith("abandoned")
    assert killed in lines[5] and lines[5].endswith("uncommitted")
    data = as_json(call, "ls", run.uri)
    assert [(row["step"], row["abandoned"], row["tags"]) for row in data["checkpoints"]] == [
        (15, False, []),
        (10, False, ["keeper"]),
        (20, True, []),
    ]
    assert data["checkpoints"][0]["metrics"] == {"loss": "nan"} and data["checkpoints"][1]["uri"] == ten.uri
    assert [row["attempt"] for row in data["uncommitted"]] == [killed]
    os.truncate(run.store.path(f"{twenty.attempt}/{MANIFEST}"), 40)
    assert "damaged" in call("ls", run.uri)[1]


def test_ls_of_a_folder_of_runs_names_them(run, call, tmp_path):
    making.run_at(tmp_path / "a b" / "other")
    code, out, _ = call("ls", tmp_path / "a b")
    assert code == 0 and "run=1" in out and "other" in out and "never launched" in out
    assert [row["name"] for row in as_json(call, "ls", tmp_path / "a b")["runs"]] == ["other", "run=1"]


def test_ls_of_an_empty_run_says_so(run, call):
    assert "no checkpoint yet" in call("ls", run.uri)[1]


def test_show_tells_what_a_checkpoint_holds(run, call):
    made = making.checkpoint(run, 10, world_size=2, metrics={"loss": 0.5})
    code, out, _ = call("show", made.uri)
    assert code == 0 and "step: 10" in out and "loss: 0.5" in out and "world_size: 2" in out
    data = as_json(call, "show", run.uri)
    assert data["uri"] == made.uri and data["bytes"] == made.manifest.nbytes and data["config"] == {"lr": 0.1}
    assert as_json(call, "show", run.uri, "--which", "step:10")["step"] == 10
    making.flip(run.store.path(f"{made.attempt}/{MANIFEST}"), 50)
    code, _, err = call("show", made.uri)
    assert code == 1 and err.startswith("error: ") and "damaged" in err
    assert call("show", f"{run.uri}/{making.write_attempt(run, 20)}")[0] == 1


def test_show_and_ls_tell_what_a_save_cost_with_units(run, call):
    costs = {"stall_s": 0.00062, "join_s": 0.02, "persist_s": 3.25, "bytes": 27_600_000, "odd_s": 10**400}
    made = making.checkpoint(run, 10, costs=costs | {"none_s": None, "words": "x"})
    _, out, _ = call("show", made.uri)
    section = out.partition("costs:\n")[2].partition("config:")[0]
    assert {line.strip() for line in section.splitlines()} == {
        "stall: 0.62 ms",
        "join: 20 ms",
        "persist: 3.2 s",
        "bytes: 27.6 MB",
        f"odd: {10**400}",
        "none: -",
        "words: x",
    }
    assert "written in" in call("ls", run.uri)[1] and "3.2 s" in call("ls", run.uri)[1]
    assert as_json(call, "ls", run.uri)["checkpoints"][0]["costs"]["stall_s"] == 0.00062


def test_verify_exits_0_for_good_1_for_bad_and_names_what_is_wrong(run, call):
    good, bad = making.checkpoint(run, 5), making.checkpoint(run, 10)
    assert call("verify", run.uri)[0] == 0
    making.flip(run.store.path(f"{bad.attempt}/{shard_name(0)}"))
    assert call("verify", "--quick", run.uri)[0] == 0
    code, out, _ = call("verify", run.uri)
    assert code == 1 and f"BAD   {bad.uri}" in out and f"good  {good.uri}" in out and "chunk 0" in out
    assert call("verify", good.uri)[0] == 0 and call("verify", bad.uri)[0] == 1
    assert call("verify", run.uri, "--which", "step:5")[0] == 0
    data = as_json(call, "verify", run.uri, code=1)
    assert data["ok"] is False and [report["ok"] for report in data["reports"]] == [False, True]
    assert call("verify", f"{run.uri}/{making.write_attempt(run, 20)}")[0] == 1


def test_a_tag_keeps_a_checkpoint_until_untagged(run, call):
    made = [making.checkpoint(run, step) for step in (5, 10)]
    assert call("tag", run.uri, "best", "--which", "step:5")[0] == 0
    assert [(pin.name, pin.attempt) for pin in pins(run)] == [("best", made[0].attempt)]
    assert call("prune", run.uri, "--keep-last", 1)[1] == "there is nothing to delete\n"
    assert call("untag", run.uri, "best")[0] == 0
    code, _, err = call("untag", run.uri, "best")
    assert code == 2 and "no tag 'best'" in err
    assert made[0].attempt in call("prune", run.uri, "--keep-last", 1)[1]


def test_commit_completes_what_a_dead_launch_left(run, call):
    assert call("commit", run.uri)[1] == "there is nothing to commit\n"
    attempt = making.write_attempt(run, 10)
    assert as_json(call, "commit", run.uri) == {"committed": [attempt], "problems": []}
    cut = making.write_attempt(run, 15)
    os.truncate(run.store.path(f"{cut}/{shard_name(0)}"), 7)
    code, out, _ = call("commit", run.uri)
    assert code == 1 and cut in out


def test_prune_says_first_and_deletes_only_what_no_rule_keeps(run, call):
    for step in (5, 10, 15, 20, 25):
        making.checkpoint(run, step, metrics={"loss": abs(step - 5)})
    rules = ["--keep-last", 1, "--keep-every", 20, "--keep-best", "loss:min"]
    before = making.tree_digest(run.store.path(""))
    assert len(as_json(call, "prune", run.uri, *rules, "--dry-run")["would_delete"]) == 2
    assert making.tree_digest(run.store.path("")) == before
    assert [name[:14] for name in as_json(call, "prune", run.uri, *rules)["deleted"]] == [
        "step-000000010",
        "step-000000015",
    ]
    assert [row["step"] for row in as_json(call, "ls", run.uri)["checkpoints"]] == [25, 20, 5]


def test_a_live_run_is_left_to_its_launch(run, call):
    from ckpt.launches import begin_launch

    making.checkpoint(run, 5)
    begin_launch(run, owner="", config=None, say=lambda _: None)
    for args in (["prune", run.uri, "--keep-last", "1"], ["commit", run.uri]):
        code, _, err = call(*args)
        assert code == 2 and f"pid {os.getpid()}" in err


WRONG = [
    [],
    ["nonsense"],
    ["ls"],
    ["ls", "NOWHERE"],
    ["ls", "s3://bucket/run"],
    ["ls", "file:/x"],
    ["show", "NOWHERE"],
    ["show", "RUN"],
    ["show", "RUN", "--which", "bes"],
    ["show", "RUN", "--which", "step:3"],
    ["verify", "NOWHERE"],
    ["verify", "RUN", "--which", "best:loss"],
    ["verify", "RUN/step-000000001-00001-00010000abcd"],
    ["tag", "RUN", "x"],
    ["tag", "RUN"],
    ["untag", "RUN", "../x"],
    ["commit", "NOWHERE"],
    ["prune", "RUN"],
    ["prune", "RUN", "--keep-last", "0"],
    ["prune", "RUN", "--keep-last", "x"],
    ["prune", "RUN", "--keep-best", "loss"],
    ["prune", "RUN", "--keep-best", "loss:maximum"],
    ["prune", "NOWHERE", "--keep-last", "1"],
]


def test_tagging_a_run_says_how_to_name_one_of_its_checkpoints(run, call):
    code, _, err = call("tag", run.uri, "best")
    assert code == 2 and "--which latest" in err


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_wrong_use_exits_2_with_a_clear_message_and_makes_nothing(run, call, tmp_path, args):
    before = making.tree_digest(tmp_path)
    full = [arg.replace("RUN", run.uri).replace("NOWHERE", f"{tmp_path}/nowhere") for arg in args]
    code, _, err = call(*full)
    assert code == 2 and "error: " in err
    assert making.tree_digest(tmp_path) == before


def test_errors_are_json_when_json_is_asked_for(run, call):
    found = as_json(call, "show", run.uri, code=2)
    assert found["error"] == "NotCommitted" and "no committed checkpoint yet" in found["message"]


def test_it_runs_as_a_module_without_torch_and_survives_a_closed_pipe(run, tmp_path):
    for step in range(1, 30):
        making.checkpoint(run, step)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    command = [sys.executable, "-m", "ckpt", "ls", run.uri]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 0 and ended.stdout.count("step-") == 29
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    os.close(write)
    assert ended.returncode == 0 and ended.stderr == ""


def test_a_checkpoint_whose_parts_are_gone_is_still_shown(run, call):
    made = making.checkpoint(run, 5)
    run.store.delete(f"{made.attempt}/{part_name(0)}")
    assert call("show", made.uri)[0] == 0 and call("verify", made.uri)[0] == 0
