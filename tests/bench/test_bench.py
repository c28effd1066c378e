"""`python -m bench`: the figures are whole, the statistics right, and wrong use is told in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import children, results
from bench.__main__ import main
from bench.engines import ALWAYS, KEYS
from bench.memory import MARK, end_marked, marked, pss
from bench.options import parse
from bench.spec import Spec
from tests.bench.made import limits, outcome

ROOT = Path(__file__).resolve().parents[2]
ALL_HAVE = [name for name in results.FIGURES if name.partition("_")[0] not in ("restore", "memory", "gil")]


def bench(*arguments, cwd=ROOT, few=()):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*few, sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)


def run_quick(tmp_path, *more, few=()):
    storage = tmp_path / "a disk"
    storage.mkdir()
    report = tmp_path / "found.json"
    arguments = ["--quick", "--size=3", "--pairs=2", f"--storage={storage}", f"--json={report}", *more]
    done = bench(*arguments, few=few)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    # On a busy machine a run may have to be discarded, and must say so; nothing else may be wrong.
    assert done.returncode == (0 if found["valid"] else 1)
    assert all(problem.startswith(("discard", "not conclusive")) for problem in found["problems"])
    assert list(storage.iterdir()) == []
    return done, found


def check_engine(found, title, stdout):
    assert all(isinstance(found[name], float | int) for name in ALL_HAVE)
    assert found["overhead_low_s"] <= found["overhead_s"] <= found["overhead_high_s"]
    assert found["title"] == title
    assert title in stdout


def test_a_run_ends_with_a_table_a_verdict_json_and_plots(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(job, spec, progress):
        asked.append((job, spec.batch, spec.windows_only))
        progress("a phase")
        return limits() if job == "limits" else outcome([0.0], every={"1": 0.5, "20": 0.01})

    monkeypatch.setattr(children, "measure", measure)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    report = tmp_path / "found.json"
    assert main([f"--storage={tmp_path}", f"--json={report}", "--engines=dcp_save,engine"]) == 0
    before = [("null", 8, False), ("floor", 8, False), ("dcp_save", 8, False), ("engine", 8, False)]
    after = [("failing", 8, False), ("null", 8, True), ("limits", 8, False)]
    assert asked == [("limits", 0, False), *before, *after]
    found = json.loads(report.read_text())
    shown = capsys.readouterr().out
    assert found["valid"]
    assert list(found["engines"]) == ["null", "floor", "dcp_save", "engine"]
    assert all(target["measured"] in shown for target in found["verdict"])
    assert "20 steps" in shown
    for picture in ("costs", "frequency"):
        assert (tmp_path / f"found-{picture}.png").stat().st_size > 1000


def measured(job, tmp_path):
    spec = Spec(3_000_000, 30, 1, "cpu", 2, (2,), True, str(tmp_path), batch=8, window=2)
    phases = []
    found = children.measure(job, spec, phases.append)
    assert (found.status, found.reason) == ("ok", "")
    assert list(tmp_path.iterdir()) == []
    assert len(found.memory) == spec.memory_saves
    assert min(found.memory) > 50_000_000  # torch alone takes more
    return found.figures, phases


def test_the_own_engine_has_all_its_figures(tmp_path):
    figures, phases = measured("engine", tmp_path)
    assert phases[0] == "prepare"
    assert figures["restore"]["different"] == []
    assert len(figures["costs"]["overhead_s"]) == 2
    assert list(figures["every"]) == ["2"]
    assert len(figures["gil_s"]) == len(figures["restore"]["cold_s"]) == 1


def test_memory_is_watched_while_every_save_fails(tmp_path):
    assert measured("failing", tmp_path)[0] == {}


@pytest.mark.long
def test_a_quick_run_ends_with_a_table_and_json_in_which_all_engines_have_their_figures(tmp_path):
    done, found = run_quick(tmp_path, "--engines=engine", "--every=1,2", "--tensors=30")
    engines = found["engines"]
    assert list(engines) == ["null", "floor", "engine"]
    check_engine(engines["null"], "nothing saved", done.stdout)
    check_engine(engines["floor"], "raw copy + write, no checkpoint", done.stdout)
    own = engines["engine"]
    check_engine(own, own["title"], done.stdout)
    assert own["equal"] is True
    assert own["restore_s"] > 0
    assert isinstance(own["gil_s"], float)
    assert list(own["lost_share"]) == ["1", "2"]
    assert len(own["samples"]["overhead_s"]) == len(own["samples"]["steal_s"]) == 2
    assert own["ratios"]["to_limit"]["durable_s"] > 0
    assert own["memory_flat"] in (True, False)
    assert own["memory_failing_flat"] in (True, False)
    assert len(own["samples"]["memory_failing_bytes"]) == len(own["samples"]["memory_bytes"])
    assert min(own["samples"]["memory_failing_bytes"]) > 1_000_000
    assert all(found["limits"][name] > 0 for name in ("memcpy_s", "write_s", "read_s", "step_s", "window"))
    assert 2_700_000 < found["limits"]["state_bytes"] <= 3_000_200
    assert {target["met"] for target in found["verdict"]} <= {True, False, None}
    assert all(target["measured"] in done.stdout for target in found["verdict"])
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
        assert figures["equal"] is (None if key in ALWAYS else True)


@pytest.mark.long
def test_many_tensors_are_measured_with_few_open_files(tmp_path):
    few = ("bash", "-c", 'ulimit -n 256 && exec "$0" "$@"')
    _, found = run_quick(tmp_path, "--engines=dcp_async_process,engine", "--tensors=3000", few=few)
    assert [key for key, figures in found["engines"].items() if figures["status"] != "ok"] == []


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
