"""The scripts for a rented GPU machine: rows survive kills, a second call adds, no case takes others along."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernels_h200
import kernels_timing
import train_h200
import tune_attention
from gpu_jobs import append, read

BENCHMARKS = Path(train_h200.__file__).parent


def test_a_torn_row_costs_itself_only(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    append(path, a=1)
    with path.open("a") as file:
        file.write('{"a": 2, "b')
    append(path, a=3)
    assert read(path) == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize(
    ("script", "words"),
    [("kernels_h200.py", ["OUT", "row"]), ("train_h200.py", ["OUT", "12m"]), ("train_h200.py", ["OUT", "losses"])],
)
def test_what_does_not_exist_is_refused_before_anything_runs(script: str, words: list[str], tmp_path: Path):
    command = [sys.executable, str(BENCHMARKS / script), str(tmp_path / "out"), *words[1:]]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "no section" in run.stderr or "--tokens" in run.stderr
    assert not (tmp_path / "out").exists()


def test_every_section_of_the_kernels_is_a_function():
    modules = [__import__(name) for name in kernels_h200.MODULES]
    for name in [*kernels_h200.CHECKS, *kernels_h200.SECTIONS]:
        assert any(callable(getattr(module, name, None)) for module in modules), name


CASES = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
import kernels_timing as timing
from pathlib import Path
timing.CASE_SECONDS = 1
timing.enter("section", 0, 1, Path({path!r}), float(sys.argv[1]))
def good(name): timing.note(case=name, ok=True)
def bad(): raise ValueError("no room")
def spoils(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def hangs(): time.sleep(30)
timing.attempt("first", good, "first")
timing.attempt("bad", bad)
timing.attempt("spoils", spoils)
timing.attempt("second", good, "second")
timing.attempt("hangs", hangs)
timing.attempt("third", good, "third")
"""


def test_a_case_that_ends_its_process_costs_itself_only(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    code = CASES.format(benchmarks=str(BENCHMARKS), path=str(path))

    def run(call: int) -> int:
        return subprocess.run([sys.executable, "-c", code, str(call)], capture_output=True).returncode

    assert [run(1), run(1), run(1)] == [3, -14, 0]
    rows = [row for row in read(path) if "case" in row]
    assert [row["case"] for row in rows if "ok" in row] == ["first", "second", "third"]
    assert [row["case"] for row in rows if "FAILED" in row] == ["bad", "spoils", "hangs"]
    run(2)  # a second call tries what failed again, and nothing else
    again = [row for row in read(path) if row["call"] == 2]
    assert {row.get("begun") for row in again} == {"bad", "spoils", None}


def test_the_script_begins_a_section_again_behind_the_case_that_ended_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "kernels.jsonl"
    code = CASES.format(benchmarks=str(BENCHMARKS), path=str(path))
    monkeypatch.setattr(kernels_h200, "SECTIONS", {"section": 60})

    def start(command, gpu, log, **environment):
        return subprocess.Popen([sys.executable, "-c", code, command[-1]], process_group=0)

    monkeypatch.setattr(kernels_h200, "start", start)
    call = kernels_h200.Call(tmp_path, 120, tiny=False)
    call.work_through(["section"], ["0", "1"])
    assert [row["case"] for row in read(path) if "ok" in row] == ["first", "second", "third"]
    assert not call.running


def test_a_peer_that_fails_leaves_the_others_times(tmp_path: Path, monkeypatch):
    """Without a GPU cuDNN's attention does not exist; the plain kernels stand in for the Hopper ones here."""
    import kernels_attention_speed as speed
    import torch

    class Here(kernels_timing.Section):
        path = tmp_path / "rows.jsonl"

    monkeypatch.setattr(kernels_timing, "Section", Here)
    monkeypatch.setattr(kernels_timing, "TINY", True)
    for name, value in {"TINY": True, "DEVICE": "cpu"}.items():
        monkeypatch.setattr(sys.modules["kernels_attention"], name, value)
    monkeypatch.setattr(speed, "TINY", True)
    speed.speed_case(
        (1, 2, 256, 16), [("ours", "flash-torch", True), ("plain", "reference", True)], True, torch.bfloat16
    )
    rows = {row.get("what"): row for row in read(Here.path) if "ms" in row}
    assert [*rows] == ["ours", "plain"]
    assert rows["plain"]["apart"] < 0.02
    assert any("FAILED" in row and "cudnn" in row["case"] for row in read(Here.path))


def test_rounds_of_two_calls_are_one_row_a_form():
    def row(call: int, index: int, form: str, ms: float) -> dict:
        return {"job": "turns-124m", "call": call, "size": "124m", "form": form, "round": index, "ms": ms}

    rows = [row(1, -1, "plain GPT", 900.0), row(1, 0, "plain GPT", 60.0), row(1, 0, "ours", 50.0)]
    rows += [
        row(2, 0, "plain GPT", 66.0),
        row(2, 0, "ours", 44.0),
        row(2, -2, "new", 33.0),
        row(2, -2, "plain GPT", 66.0),
    ]
    found = {r["form"]: r for r in train_h200.summary(rows)}
    assert found["plain GPT"]["ms"] == 63.0
    assert found["ours"]["rounds"] == 2
    assert found["ours"]["x_plain"] == pytest.approx((60 / 50 + 66 / 44) / 2)
    assert found["new"]["x_plain"] == 2.0


def test_a_second_call_leaves_out_what_is_done_and_a_slow_job_holds_up_no_other(tmp_path: Path, monkeypatch):
    path = tmp_path / "train.jsonl"
    append(path, job="done before", done=True)
    code = "import json, sys, time; time.sleep(float(json.loads(sys.argv[4])[0])); "
    code += "open(sys.argv[1], 'a').write(json.dumps({'job': sys.argv[2], 'ms': time.time()}) + chr(10))"

    def start(command, gpu, log, **environment):
        log.touch()
        return subprocess.Popen([command[0], "-c", code, *command[2:]], process_group=0)

    monkeypatch.setattr(train_h200, "start", start)
    monkeypatch.setattr(train_h200, "gpus", lambda: ["0", "1"])
    names = {"slow": 4, "done before": 0, "quick": 0, "quicker": 0}
    jobs = [train_h200.Job(name, "step_row", [wait]) for name, wait in names.items()]
    train_h200.work_through(jobs, tmp_path, time.time() + 100)
    assert [row["job"] for row in read(path) if "ms" in row] == ["quick", "quicker", "slow"]
    assert len(json.loads((tmp_path / "train.json").read_text())) == 3


def test_the_tuner_goes_on_where_it_stopped_and_keeps_the_fastest(tmp_path: Path, monkeypatch):
    path, tiles = tmp_path / "rows.jsonl", tune_attention.candidates("keys", 16, 64)
    now = json.loads(tune_attention.TABLE.read_text())["keys"]["16"]["64"]
    assert tiles[: len(now)] == now  # the table's own come first
    assert [64, 64, 4, 2] in tiles
    assert len(tiles) == len({json.dumps(tile) for tile in tiles})
    code = "import json, os, sys; job = json.loads(sys.argv[3]); tile = job[3]; assert tile[0] < 128, 'no room'; "
    code += "row = dict(kernel=job[0], bits=job[1], width=job[2], tile=tile, error=1e-3, ms=tile[0] / tile[3]); "
    code += "open(sys.argv[1], 'a').write(json.dumps(row) + chr(10))"

    def start(command, gpu, log, **environment):
        with log.open("w") as output:
            return subprocess.Popen([command[0], "-c", code, *command[2:]], stderr=output, process_group=0)

    monkeypatch.setattr(tune_attention, "start", start)
    jobs = [("keys", 16, 64, tile) for tile in ([64, 64, 4, 2], [64, 64, 4, 3], [128, 64, 4, 2])]
    tune_attention.work_through(path, jobs[:1], 2, 60)
    tune_attention.work_through(path, jobs, 2, 60)
    rows = read(path)
    assert [row["tile"][3] for row in rows if "ms" in row] == [2, 3]
    assert [row["last"] for row in rows if "failed" in row] == [["AssertionError: no room"]]
    table = tune_attention.chosen(rows, json.loads(tune_attention.TABLE.read_text()))
    assert table["keys"]["16"]["64"] == [[64, 64, 4, 3]]
