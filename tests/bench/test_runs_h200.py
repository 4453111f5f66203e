"""The script that runs what docs/training.md measures: who gets a GPU when, deadlines, going on where it stopped."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_jobs
import runs_h200
from runs_h200 import Job, next_job, work_through


def job(name: str, timed: bool = False, code: str = "pass", limit: float = 60) -> Job:
    return Job(name, [sys.executable, "-c", code], limit, timed)


def on(job: Job, gpu: int) -> Job:
    job.gpu = gpu
    return job


def test_one_gpu_is_shared_first_and_then_timed():
    shared, timed = [job(f"s{i}") for i in range(3)], [job(f"t{i}", timed=True) for i in range(3)]

    def begins(waiting: list[Job], running: list[Job]) -> str | None:
        found = next_job(waiting, running, 0, 1, workers=2)
        return found and found.name

    assert begins(shared + timed, []) == "s0"
    assert begins(shared[1:] + timed, [on(shared[0], 0)]) == "s1"
    assert begins(shared[2:] + timed, [on(shared[0], 0), on(shared[1], 0)]) is None
    assert begins(timed, [on(shared[2], 0)]) is None  # nobody shares a GPU with a timed job
    assert begins(timed, []) == "t0"
    assert begins(timed[1:], [on(timed[0], 0)]) == "t1"  # which prepares
    assert begins(timed[2:], [on(timed[0], 0), on(timed[1], 0)]) is None


def test_the_last_of_two_gpus_takes_the_timed_jobs():
    waiting = [job("s0"), job("t0", timed=True)]
    assert [next_job(waiting, [], gpu, 2, workers=2).name for gpu in (0, 1)] == ["s0", "t0"]
    assert next_job(waiting[1:], [], 0, 2, workers=2).name == "t0"
    assert next_job(waiting[:1], [], 1, 2, workers=2).name == "s0"
    assert next_job(waiting[:1], [on(job("t1", timed=True), 1)], 1, 2, workers=2) is None


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "out").mkdir()
    return tmp_path


def go(jobs: list[Job], place: Path, seconds: float = 60) -> dict:
    args = argparse.Namespace(gpus=1, workers=4, visible=["3"])
    return work_through(args, jobs, place, place / "out", time.monotonic() + seconds)


def test_results_are_kept_and_what_is_done_is_not_done_again(place: Path):
    good = job("good", code="print('ROW {\"a\": 1}')")
    bad = job("bad", code="raise SystemExit('no room')")
    slow = job("slow", code="import time; time.sleep(60)", limit=0.3)
    found = go([good, bad, slow], place)
    assert found["good"]["row"] == {"a": 1}
    assert found["bad"]["status"] == "exit code 1"
    assert found["bad"]["tail"] == ["no room"]
    assert found["slow"]["status"] == "over 0.3 s"
    assert json.loads((place / "out" / "results.json").read_text()) == found
    again = go([job("good", code="raise SystemExit(1)"), job("bad")], place)
    assert [again[name]["status"] for name in ("good", "bad", "slow")] == ["ok", "ok", "over 0.3 s"]


def test_a_deadline_stops_what_runs_with_its_children_and_begins_nothing(place: Path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = time.monotonic()
    found = go([job("parent", code=code), *(job(f"more{i}", timed=True) for i in range(2))], place, seconds=0.5)
    assert found["parent"]["status"] == "stopped at the deadline"
    assert set(found) == {"parent"}
    assert time.monotonic() - start < 30


def test_jobs_run_on_the_gpus_of_the_callers_list(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert gpu_jobs.gpus(2) == ["2", "3"]
    assert gpu_jobs.gpus(1) == ["2"]
    found = go([job("shown", code="import os; print('ROW ' + os.environ['CUDA_VISIBLE_DEVICES'])")], place)
    assert found["shown"]["row"] == 3


def test_a_stopped_script_stops_its_jobs_and_keeps_what_it_has(place: Path):
    """SIGTERM to a script in the middle of two jobs, of which one has a child."""
    script = f"""
import argparse, sys, time
sys.path.insert(0, {str(Path(runs_h200.__file__).parent)!r})
from pathlib import Path
from gpu_jobs import exit_on_signals
from runs_h200 import Job, work_through
exit_on_signals()
place = Path({str(place)!r})
child = "import os, subprocess, sys; print(os.getpid(), flush=True); "
child += "subprocess.run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])"
jobs = [Job(name, [sys.executable, "-c", child], 60) for name in "ab"]
work_through(argparse.Namespace(gpus=1, workers=4, visible=["0"]), jobs, place, place / "out", time.monotonic() + 60)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    logs, pids = [place / "logs" / f"{name}.txt" for name in "ab"], []
    until = time.monotonic() + 50
    while len(pids) < 4 and time.monotonic() < until:
        time.sleep(0.05)
        pids = [int(word) for log in logs if log.exists() for word in log.read_text().split()]
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert len(pids) == 4
    found = json.loads((place / "out" / "results.json").read_text())
    assert [found[name]["status"] for name in "ab"] == ["stopped by a signal"] * 2
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_run_that_ends_before_it_is_killed_proves_no_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import runs_jobs

    ends = "import sys; sys.exit(3 * sys.argv[-1].endswith('broken'))"
    does_all = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
(out / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1.0}) + chr(10) for n in range(1, 201)))
time.sleep(60 * (out.name == 'broken'))
"""
    for code, message in ((ends, "exit code 3"), (does_all, "all of its 200 steps")):
        monkeypatch.setattr(runs_jobs, "CLI", [sys.executable, "-c", code])
        with pytest.raises(SystemExit, match=message):
            runs_jobs.resume(str(tmp_path))


def test_every_section_has_jobs_of_functions_that_exist(tmp_path: Path):
    import runs_jobs

    steps = {"ablation": 3, "muon": 20, "loop": 30}
    for section in runs_h200.SECTIONS:
        args = argparse.Namespace(sections=[section], gpus=2, workers=3, tiny=True, steps=steps)
        jobs = runs_h200.plan(args, tmp_path)
        assert jobs
        assert len({j.name for j in jobs}) == len(jobs)
        for command in (j.command for j in jobs if j.command[1].endswith("runs_jobs.py")):
            assert callable(getattr(runs_jobs, command[2]))


def test_bars_that_do_not_fit_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import runs_jobs
    from matplotlib.figure import Figure

    def row(name: str, change: float | None) -> SimpleNamespace:
        return SimpleNamespace(name=name, change=change, valid_loss=4.0)

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: figures.append(figure))
    rows = [row("baseline", None), row("worse", 2.5), row("better", -0.2), row("a bit", 0.4), row("stopped", None)]
    runs_jobs.draw_changes(rows, tmp_path / "cut.png")
    axes = figures[0].axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["worse", "a bit", "better"]
    assert [bar.get_width() for bar in axes.patches] == [runs_jobs.MOST, 0.4, -0.2]
    assert [text.get_text() for text in axes.texts] == ["+2.500", "+0.400", "-0.200"]
    arrowheads = [line for line in axes.lines if line.get_marker() == ">"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in arrowheads] == [(runs_jobs.MOST, 0)]
    assert "longer than drawn" in axes.get_xlabel()
    assert "seeds" not in axes.get_xlabel()
    runs_jobs.draw_changes([*rows[:1], rows[2], row("seed-1", 0.02)], tmp_path / "whole.png")
    label = figures[1].axes[0].get_xlabel()
    assert "longer than drawn" not in label
    assert "other seeds, ±0.020" in label
