"""`python -m bench`: the figures are whole, the statistics right, and wrong use is told in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import results, spec
from bench.children import Outcome
from bench.engines import KEYS
from bench.intervals import Interval, bootstrap, paired_overheads
from bench.memory import MARK, end_marked, marked, pss
from bench.options import parse

ROOT = Path(__file__).resolve().parents[2]
FIGURES = [name for name in results.FIGURES if not name.startswith("restore")]


def bench(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)


def run_quick(tmp_path, *more):
    storage = tmp_path / "a disk"
    storage.mkdir()
    report = tmp_path / "found.json"
    done = bench("--quick", "--size=3", "--pairs=2", f"--storage={storage}", f"--json={report}", *more)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    # On a busy machine a run may have to be discarded, and must say so; nothing else may be wrong.
    assert done.returncode == (0 if found["valid"] else 1)
    assert all(problem.startswith("discard") for problem in found["problems"])
    assert list(storage.iterdir()) == []
    return done, found


def check_engine(found, title, stdout):
    assert all(isinstance(found[name], float | int) for name in FIGURES)
    assert found["overhead_low_s"] <= found["overhead_s"] <= found["overhead_high_s"]
    assert found["title"] == title
    assert title in stdout


def test_a_quick_run_ends_with_a_table_and_json_in_which_all_engines_have_their_figures(tmp_path):
    done, found = run_quick(tmp_path, "--engines=engine", "--every=1,2", "--tensors=30")
    engines = found["engines"]
    assert list(engines) == ["null", "engine"]
    check_engine(engines["null"], "nothing saved", done.stdout)
    own = engines["engine"]
    check_engine(own, own["title"], done.stdout)
    assert own["equal"] is True
    assert own["restore_s"] > 0
    assert list(own["lost_share"]) == ["1", "2"]
    assert len(own["samples"]["overhead_s"]) == 2
    assert own["ratios"]["to_limit"]["durable_s"] > 0
    assert all(found["limits"][name] > 0 for name in ("memcpy_s", "write_s", "read_s", "step_s", "window"))
    assert 2_700_000 < found["limits"]["state_bytes"] <= 3_000_200
    for picture in ("costs", "frequency"):
        assert (tmp_path / f"found-{picture}.png").stat().st_size > 1000


@pytest.mark.long
def test_every_engine_that_is_installed_gives_back_what_it_saved(tmp_path):
    done, found = run_quick(tmp_path)
    assert list(found["engines"]) == list(KEYS)
    for key, figures in found["engines"].items():
        if figures["status"] == "absent":
            assert figures["reason"]
            continue
        check_engine(figures, figures["title"], done.stdout)
        assert figures["equal"] is (None if key == "null" else True)


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["--engines=null,nothing"], "there is no 'nothing'"),
        (["--pairs=23"], "--pairs must be from 24"),
        (["--size=many"], "not 'many'"),
        (["--size=1", "--tensors=1000000"], "--tensors"),
        (["--every=1,0"], "--every"),
        (["--device=tpu"], "cpu or cuda"),
        (["--storage=not/there"], "--storage"),
        (["--size=900000"], "free"),
        (["--json=not/there/x.json"], "--json"),
    ],
)
def test_a_bad_argument_is_one_clear_line_and_nothing_is_made(arguments, about, tmp_path, capsys):
    if about == "--storage":  # as a person sees it; the others are spared the start of a process
        done = bench(*arguments, cwd=tmp_path)
        code, said = done.returncode, done.stderr
    else:
        with pytest.raises(SystemExit) as ended:
            parse(arguments)
        code, said = ended.value.code, capsys.readouterr().err
    assert code == 2
    assert about in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_no_process_and_no_folder(tmp_path):
    command = [sys.executable, "-m", "bench", "--quick", "--size=3", f"--storage={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert "calibrate" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "interrupted: what was made is removed\n"
    assert list(tmp_path.iterdir()) == []


def test_the_parent_of_the_measured_processes_needs_no_torch():
    code = "import sys, bench.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_an_interval_holds_the_median_and_is_the_same_for_the_same_samples():
    found = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median == 3.0
    assert 1.0 <= found.low <= 3.0 <= found.high <= 100.0
    assert found == bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert bootstrap([5.0]) == Interval(5.0, 5.0, 5.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


def test_an_interval_covers_the_true_median_about_nine_times_in_ten():
    import numpy as np

    rng = np.random.default_rng(1)
    held = sum(bootstrap(list(rng.normal(0.0, 1.0, 24)), seed).holds_zero for seed in range(200))
    assert 165 <= held <= 198


def test_an_overhead_is_what_a_save_window_took_beyond_the_controls_around_it():
    # The machine slows down steadily; the second save window went on for two more steps.
    assert paired_overheads([4.0, 6.0, 8.0], [(7.0, 4), (13.0, 6)], 4) == [2.0, 2.5]
    with pytest.raises(ValueError, match="need 2 controls"):
        paired_overheads([1.0], [(1.0, 1)], 1)


def outcome(overheads, different=(), memory=10):
    interval = bootstrap(overheads)
    costs = {name: [0.5] for name in ("stall_s", "join_s", "durable_s")}
    costs["interval"] = {"median": interval.median, "low": interval.low, "high": interval.high}
    restore = {"cold_s": [1.0], "warm_s": [1.0], "different": list(different)}
    first = {"stall_s": 0.1, "join_s": 0.2}
    told = {"title": "t", "note": "", "costs": costs, "restore": restore, "first": first}
    return Outcome("ok", "", told, [memory, memory + 5])


def summary(**outcomes):
    asked = spec.Spec(100, 3, 1, "cpu", 24, (), False, "/x")
    limits = {"memcpy_s": 0.1, "write_s": 0.25, "read_s": 0.5, "state_bytes": 20}
    return results.summarize(asked, limits, outcomes)


def test_a_run_in_which_saving_nothing_costs_something_is_discarded():
    assert summary(null=outcome([-1.0, 0.5, 1.0]))["valid"]
    found = summary(null=outcome([1.0, 1.1, 1.2]))
    assert not found["valid"]
    assert "discard this run" in found["problems"][0]


def test_a_run_in_which_something_else_comes_back_is_not_valid():
    found = summary(null=outcome([0.0]), engine=outcome([1.0], different=["model.w"]))
    assert found["problems"] == ["engine: what came back is not what was saved"]


def test_figures_are_compared_with_the_reference_the_limits_and_saving_nothing():
    found = summary(null=outcome([0.0]), dcp_save=outcome([4.0]), engine=outcome([1.0], memory=34))
    figures = found["engines"]["engine"]
    assert figures["memory_bytes"] == 24
    assert figures["first_stall_s"] == pytest.approx(0.3)
    assert figures["ratios"]["to_reference"]["overhead_s"] == 0.25
    assert figures["ratios"]["to_limit"]["durable_s"] == 2.0
    assert figures["ratios"]["to_limit"]["memory_bytes"] == pytest.approx(1.2)


def test_memory_is_counted_of_all_that_a_process_started_and_all_of_it_is_ended():
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    held = bytearray(b'x') * (64 << 20)\n"
        "time.sleep(60)\n"
    )
    mark = f"test-{os.getpid()}"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark})
    try:
        deadline = time.monotonic() + 20
        while pss(marked(mark)) < 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(marked(mark)) == 2
        assert 64 << 20 <= pss(marked(mark)) < 128 << 20
    finally:
        end_marked(mark)
        process.wait(10)
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == []
