"""What people type: names and paths stay text, the rest is Hydra's."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from flows import overrides as ov
from flows.overrides import ConfigError


@pytest.mark.parametrize("name", ["1e3", "2026_12_01", "true", "null1", "brave-otter", "0x10", "1.5", "a.b"])
def test_a_run_name_is_read_as_text(name):
    options, rest = ov.take(ov.normalise([f"run={name}", "seed=1"]), ("run",))
    assert options == {"run": name}
    assert rest == ["seed=1"]
    assert ov.check_run_name(options["run"]) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("a/b", "'/'"),
        ("a b", "' '"),
        ("ü", "'ü'"),
        ("..", "begins with '.'"),
        ("-x", "begins with '-'"),
        ("a=b", "'='"),
        ("x" * 201, "200"),
    ],
)
def test_a_refused_run_name_is_explained(name, why):
    with pytest.raises(ConfigError, match=r"run") as caught:
        ov.check_run_name(name)
    assert why in str(caught.value)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1))
def test_any_path_survives_quoting(path):
    quoted = ov.quote(path)
    assert ov.unquote(quoted) == path
    assert OverridesParser.create().parse_override(f"key={quoted}").value() == path


@pytest.mark.parametrize(
    "path", ["/a b/ü", "/t/[x]", "/t/a=b/step=10", "~/runs", "/a,b", "/a'b", "/a\\b", "{x}", "/a:b"]
)
def test_a_storage_root_needs_no_quoting(path):
    texts = ov.normalise([f"storage.root={path}"])
    assert ov.normalise(texts) == texts
    assert OverridesParser.create().parse_override(texts[0]).value() == path


def test_other_values_that_hydra_cannot_parse_are_taken_as_text():
    (text,) = ov.normalise(["extra.note=~/x"])
    assert OverridesParser.create().parse_override(text).value() == "~/x"


def test_lists_and_numbers_stay_what_they_are():
    assert ov.normalise(["optim.betas=[0.9,0.99]", "optim.lr=1e-3"]) == [
        "optim.betas=[0.9,0.99]",
        "optim.lr=1e-3",
    ]


def test_what_is_no_override_is_named():
    with pytest.raises(ConfigError, match="'steps' is not an override"):
        ov.normalise(["steps"])


def test_a_misspelt_option_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match="whch, did you mean 'which'"):
        ov.refuse_misspelt_options(["whch=best"], ("run", "which"))
    ov.refuse_misspelt_options(["trainer.max_steps=3", "optim=adamw", "seed=1"], ("run", "which", "force"))


def test_saved_additions_compose_again():
    assert ov.merged(["+extra.a=1", "model=mlp"], ["+extra.a=2"]) == [
        "++extra.a=1",
        "model=mlp",
        "++extra.a=2",
    ]


def test_a_sweep_makes_one_override_list_for_each_combination():
    assert ov.jobs(["optim.lr=1e-3,3e-4", "seed=1"]) == [
        ["optim.lr=0.001", "seed=1"],
        ["optim.lr=0.0003", "seed=1"],
    ]


def test_a_named_sweep_numbers_its_runs_and_keeps_the_name_as_text():
    names = [ov.take(job, ("run",))[0]["run"] for job in ov.jobs(["run=1e3", "seed=1,2"])]
    assert names == ["1e3-0", "1e3-1"]
    names = [ov.take(job, ("run",))[0]["run"] for job in ov.jobs(["run=1e3,2026_12_01"])]
    assert names == ["1e3", "2026_12_01"]


def test_names_and_values_are_not_swept_over_together():
    with pytest.raises(ConfigError, match="not both"):
        ov.jobs(["run=a,b", "seed=1,2"])
