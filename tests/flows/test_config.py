"""The config is composed and checked before anything is made from it."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.policies import Continuous, EverySteps, OverheadBudget, YoungDaly
from flows.config import load
from flows.overrides import ConfigError
from training.build import build

CONF = Path(__file__).parents[2] / "conf"


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load("train", list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("+optim.lrr=1", "optim.lr"),
        ("++optim.lrr=1", "optim.lr"),
        ("trainer.max_step=3", "trainer.max_steps"),
        ("+trainer.max_step=3", "trainer.max_steps"),
        ("checkpoint.save.evry=3", "checkpoint.save.every"),
        ("+checkpoint.save.evry=3", "checkpoint.save.every"),
        ("+checkpoint.slot=3", "checkpoint.slots"),
        ("modle.width=3", "model.width"),
        ("+tracking.url=x", "tracking.uri"),
        ("model=gtp", "gpt"),
        ("checkpoint/keep=bst", "best"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(typo, meant):
    said = refusal(typo)
    assert f"did you mean '{meant}'?" in said
    assert "\n" not in said


def test_n1_the_config_is_plain_json_whatever_it_was_made_of():
    composed = load(
        "train",
        [
            "extra={a: [1, [2, {b: null}]], when: '${now:%Y}', lr: '${optim.lr}', t: [0.9, 0.95]}",
            "debug=smoke",
        ],
    )
    extra = json.loads(json.dumps(composed.saved))["extra"]
    assert extra["a"] == [1, [2, {"b": None}]]
    assert extra["lr"] == composed.values["optim"]["lr"]
    assert extra["when"].isdigit()
    assert "${" not in json.dumps(composed.values)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.max_steps=abc", "trainer.max_steps=abc must be a whole number"),
        ("trainer.max_steps=1.5", "trainer.max_steps=1.5 must be a whole number"),
        ("trainer.max_steps=0", "trainer.max_steps=0 must be at least 1"),
        ("trainer.precision=fp8", "trainer.precision=fp8 must be one of fp32, bf16, fp16"),
        ("trainer.deterministic=2", "trainer.deterministic=2 must be true or false"),
        ("optim.lr=fast", "optim.lr=fast must be a number"),
        (
            "checkpoint/save=overhead_budget checkpoint.save.percent=101",
            "checkpoint.save.percent=101 must be at most 100",
        ),
        (
            "checkpoint/save=young_daly checkpoint.save.mtbf_hours=0",
            "checkpoint.save.mtbf_hours=0 must be at least",
        ),
        ("checkpoint.save.every=0", "checkpoint.save.every=0 must be at least 1"),
        ("checkpoint.keep.n=0", "checkpoint.keep.n=0 would keep no checkpoint"),
        ("optim.lr=1,2", "optim.lr=1,2 holds several values"),
    ],
)
def test_a_value_of_the_wrong_kind_gets_one_clear_line(override, said):
    line = refusal(*override.split())
    assert line.startswith(said)
    assert "\n" not in line


def test_what_has_no_value_is_named(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    said = refusal(
        "extra.a=???", "extra.b='${oc.env:NOT_SET}'", "extra.c='${hydra:runtime.cwd}'", "extra.d='${no.such}'"
    )
    lines = said.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("extra.a has no value")
    assert "extra.b needs the environment variable NOT_SET" in lines[1]
    assert lines[2].startswith("extra.c is ${hydra:runtime.cwd}")
    assert lines[3].startswith("extra.d is ${no.such}")


def test_free_nodes_take_anything_without_a_plus():
    values = load("train", ["extra.note=hello", "tracking.tags.team=a", "launcher.env.X_Y=1"]).values
    assert values["extra"] == {"note": "hello"}
    assert values["tracking"]["tags"] == {"team": "a"}
    assert values["launcher"]["env"] == {"X_Y": 1}


def test_secrets_are_used_but_never_saved(monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2hunter2")
    composed = load(
        "train",
        [
            "extra.api_token=abcdefgh",
            "extra.url='http://me:pass word@host/x?t=${extra.api_token}'",
            "extra.key='${oc.env:MY_KEY}'",
            "tracking.uri=http://u:swordfish@host:5000",
        ],
    )
    assert composed.values["extra"]["key"] == "hunter2hunter2"
    assert composed.values["tracking"]["uri"] == "http://u:swordfish@host:5000"
    saved = json.dumps([composed.saved, composed.overrides])
    for secret in ("abcdefgh", "hunter2", "swordfish"):
        assert secret not in saved
    assert composed.saved["extra"]["key"] == "${oc.env:MY_KEY}"


def test_a_target_of_your_own_is_checked_against_its_signature(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Net:\n    def __init__(self, width: int, depth: int = 2): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["~model", "+model._target_=mine.Net", "+model.width=3", "data.context=64"]
    assert load("train", own).values["model"] == {"_target_": "mine.Net", "width": 3}
    assert "did you mean 'model.depth'?" in refusal(*own, "+model.depht=3")
    assert "there is no package 'nope'" in refusal("~model", "+model._target_=nope.Net", "data.context=64")
    assert "module 'mine' has no 'Nat'" in refusal("~model", "+model._target_=mine.Nat", "data.context=64")


def test_threads_compose_at_the_same_time():
    def width(number):
        return load("train", [f"model.width={number * 6}"]).values["model"]["width"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(width, range(1, 17))) == [n * 6 for n in range(1, 17)]


def test_a_hydra_instance_of_the_caller_is_left_as_it_was():
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("conf", version_base="1.3"):
        before = GlobalHydra.instance().hydra
        load("train", [])
        assert GlobalHydra.instance().hydra is before


def test_every_group_choice_composes_and_is_checked():
    for page in sorted(CONF.rglob("*.yaml")):
        group = page.parent.relative_to(CONF).as_posix()
        if group in (".", "local"):
            continue
        more = ["data=digits"] if page.stem == "mlp" else []
        more += ["model=mlp"] if page.stem == "digits" else []
        more += ["storage.root=/x"] if group == "storage" else []
        more += ["storage.s3.endpoint=https://x"] if page.stem == "flashblade_s3" else []
        sign = "+" if group == "local" else ""
        load("train", [f"{sign}{group}={page.stem}", *more])


def test_every_default_has_its_reason_above_it():
    for page in (
        "train.yaml",
        "resume.yaml",
        "evaluate.yaml",
        "launcher/local.yaml",
        "storage/s3.yaml",
        "storage/flashblade_s3.yaml",
        "storage/flashblade_nfs.yaml",
        "checkpoint/default.yaml",
    ):
        lines = (CONF / page).read_text().partition("\nhydra:")[0].splitlines()
        for above, line in itertools.pairwise(lines):
            key = line.strip().lstrip("- ")
            opens_node = line.endswith(":") or not line.strip() or line.strip().startswith("#")
            if opens_node or key.startswith(("_self_", "train", "override hydra/job", "_target_")):
                continue
            assert above.strip().startswith("#") or "override hydra" in above, f"{page}: {line}"


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        (["checkpoint/save=overhead_budget", "checkpoint.save.percent=1"], OverheadBudget(percent=1)),
        (["checkpoint/save=young_daly", "checkpoint.save.mtbf_hours=3"], YoungDaly(mtbf_hours=3)),
        (["checkpoint/save=continuous", "checkpoint.save.min_s=5"], Continuous(min_s=5)),
        (["checkpoint.save.every=7"], EverySteps(7)),
    ],
)
def test_when_to_save_is_a_choice_also_on_top_of_the_smoke_test(overrides, policy):
    assert build(load("train", ["debug=smoke", *overrides]).values["checkpoint"]["save"]) == policy


def test_settings_of_this_machine_are_read_from_a_file_that_git_ignores(tmp_path):
    ignored = subprocess.run(
        ["git", "check-ignore", "conf/local/default.yaml"], cwd=CONF.parent, capture_output=True, text=True
    )
    assert ignored.returncode in (0, 128)  # 128: not a git checkout
    assert "optional local: default" in (CONF / "train.yaml").read_text()


def test_composing_and_planning_import_neither_torch_nor_prefect_nor_mlflow():
    code = (
        "import sys; import flows.cli; from flows.config import load; load('train', ['debug=smoke']);"
        "bad = {'torch', 'prefect', 'mlflow', 'numpy'} & set(sys.modules); sys.exit(f'{bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
