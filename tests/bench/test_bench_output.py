"""Tables, plots, comparisons, checks, Slurm scripts and the command line."""

import json
import subprocess

import pytest
from bench_tools import cell, in_process, time_summary, tiny_cells, validate

from groundup.bench import check as check_module
from groundup.bench.benchmark import find
from groundup.bench.check import check_steps, hardware_of, missed
from groundup.bench.diff import diff, diff_table
from groundup.bench.plots import plot, series
from groundup.bench.slurm import slurm_script, without_flag
from groundup.bench.tables import check_table, table
from groundup.cli import dispatch
from groundup.errors import UserError


def norm_cells():
    return [
        cell(
            metrics={"time.forward": time_summary(2.0, 0.1), "bandwidth.forward": 3.5}, implementation="eager", rows=4
        ),
        cell(status="oom", message="CUDA out of memory", implementation="compiled", rows=4),
    ]


def test_a_table_shows_what_varies_and_keeps_failures():
    text = table(find("norm"), norm_cells())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert [word.strip() for word in rows[0].strip("|").split("|")] == [
        "implementation",
        "forward, ms",
        "forward, GB/s",
    ]
    assert "2.000 ± 0.1000" in rows[2]
    assert "OOM" in rows[3]
    assert "rows 4" in text
    assert "float32" in text


def test_a_latex_table():
    text = table(find("norm"), norm_cells(), "latex")
    assert r"\toprule" in text
    assert all(line.startswith("%") for line in text.splitlines()[text.splitlines().index(r"\end{tabular}") + 1 :])


def test_series_of_a_plot(tmp_path):
    cells = [
        cell(metrics={"bandwidth.forward": float(h)}, implementation=name, hidden=h)
        for h in (64, 16)
        for name in ("eager", "layer_norm")
    ]
    lines = series(find("norm"), cells)
    assert lines["implementation eager"] == ([16, 64], [16.0, 64.0], [0.0, 0.0])
    plot(find("norm"), cells, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no cell"):
        plot(find("norm"), norm_cells()[1:], tmp_path / "b.png")
    with pytest.raises(UserError, match=r"\.svg"):
        plot(find("norm"), cells, tmp_path / "b.jpg")


def test_diff_tells_change_from_noise():
    def one(median, std, memory, status="ok"):
        return [cell(status=status, metrics={"time.forward": time_summary(median, std), "memory.peak": memory}, rows=4)]

    rows = {row["metric"]: row for row in diff(one(10.0, 0.3, 100), one(10.5, 0.3, 101))}
    assert rows["time.forward"]["ratio"] == pytest.approx(1.05)
    assert rows["time.forward"]["changed"] is False
    assert rows["memory.peak"]["changed"] is True
    assert diff(one(10.0, 0.2, 100), one(10.5, 0.2, 100))[0]["changed"] is True
    statuses = diff(one(1.0, 0.0, 1), one(1.0, 0.0, 1, status="oom"))
    assert statuses[0]["metric"] == "status"
    assert "within the spread" in diff_table(diff(one(10.0, 0.3, 100), one(10.5, 0.3, 101)))
    with pytest.raises(UserError, match="no cell is in both"):
        diff(one(1.0, 0.0, 1), [cell(rows=5)])


def test_diff_ignores_how_often_a_cell_was_measured():
    old, new = ([cell(metrics={"time.forward": time_summary(1.0)}, rows=4, steps=n, seed=n)] for n in (5, 50))
    assert diff(old, new)[0]["ratio"] == 1.0


def test_check_is_exact_where_it_says_exact():
    cells = tiny_cells("step", precision="fp32,bf16", mode="forward,train-step")
    rows = check_steps(cells)
    assert not missed(rows)
    assert {row["line"] for row in rows if row["met"]} == {
        "parameters.total",
        "memory.gradients",
        "memory.optimizer",
        "flops.forward",
        "flops.backward",
    }
    assert {row["reason"] for row in rows if row["line"] == "memory.peak"} == {"not measured"}
    cells[0]["metrics"]["flops.forward"] += 1
    assert [row["line"] for row in missed(check_steps(cells))] == ["flops.forward"]


def test_check_holds_memory_and_time_to_their_targets(monkeypatch):
    measured = tiny_cells("step")[0]
    measured["metrics"] |= {"memory.static": 1000, "memory.peak": 1000, "time.step": time_summary(10.0)}
    figures = {"memory.static": 1009, "memory.peak": 1049, "time.step": 11.4}
    monkeypatch.setattr(check_module, "predictions", lambda *args: figures)
    verdicts = {row["line"]: row["met"] for row in check_steps([measured])}
    assert (verdicts["memory.static"], verdicts["memory.peak"], verdicts["time.step"]) == (True, True, True)
    figures |= {"memory.static": 1011, "memory.peak": 949, "time.step": 8.4}
    rows = check_steps([measured])
    assert [row["line"] for row in missed(rows)] == ["memory.static", "memory.peak", "time.step"]
    assert "MISSED" in check_table(rows)
    measured["parameters"]["compile"] = "model"
    peak = next(row for row in check_steps([measured]) if row["line"] == "memory.peak")
    assert (peak["met"], peak["reason"]) == (None, "eager only")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "h200-measured"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-PCIE-40GB", ""),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA L40", ""),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A1000", ""),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("Some other device", ""),
        ("", ""),
    ],
)
def test_the_gpu_is_found_in_the_accounts_table(name, entry):
    assert hardware_of({"environment": {"gpu": name}}) == entry


def test_a_slurm_script_is_a_shell_script():
    argv = without_flag(["--size", "small", "--slurm", "a.sh", "--config", "my file.toml"], "--slurm")
    assert argv == ["--size", "small", "--config", "my file.toml"]
    assert without_flag(["--slurm=a.sh", "--fresh"], "--slurm") == ["--fresh"]
    script = slurm_script("step", argv, 30, 60.0, on_gpu=True)
    assert "groundup bench step --size small --config 'my file.toml'" in script
    assert "--gres=gpu:1" in script
    assert "--time=00:40:00" in script
    assert "export SRUN_CPUS_PER_TASK=" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def run(capsys, *argv):
    code = dispatch(["bench", *argv])
    return code, capsys.readouterr()


STEP = ["step", "--size", "tiny", "--context", "8", "--steps", "1", "--warmup", "1", "--device", "cpu"]


def test_a_sweep_from_the_command_line(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    code, streams = run(capsys, *STEP, "--check", "--strict", "--json", "--table", "t.tex", "--plot", "p.svg")
    assert code == 0
    whole = json.loads(streams.out)
    validate(whole)
    assert whole["check"]
    assert "toprule" in (tmp_path / "t.tex").read_text()
    assert (tmp_path / "p.svg").exists()
    assert "[1/1] tiny" in streams.err
    assert list((tmp_path / "runs/bench/step").iterdir())

    code, streams = run(capsys, *STEP, "--json", "result.json")
    assert "forward, ms" in streams.out
    validate(json.loads((tmp_path / "result.json").read_text()))
    code, streams = run(capsys, "table", "runs/bench", "--where", "size=tiny", "--json")
    assert json.loads(streams.out)["cells"] == whole["cells"]
    code, streams = run(capsys, "diff", "result.json", "runs/bench/step", "--all")
    assert code == 0
    assert "1.000" in streams.out
    code, streams = run(capsys, "check", "result.json", "--strict")
    assert code == 0
    assert "exact" in streams.out


def test_a_result_is_not_taken_for_the_file_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("a result")
    with pytest.raises(UserError, match=r"--json a\.json: this file exists; write --json=a\.json"):
        run(capsys, "check", "--json", "a.json", "b.json")
    assert (tmp_path / "a.json").read_text() == "a result"
    for argv in (["--json=a.json", "b.json"], ["--json", "new.json", "b.json"], ["b.json", "--json", "a.json"]):
        with pytest.raises(UserError, match=r"no such result file or directory: b\.json"):
            run(capsys, "check", *argv)


def test_strict_fails_on_a_missed_target(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch)
    monkeypatch.setattr(check_module, "predictions", lambda *args: {"parameters.total": 1})
    argv = [*STEP, "--out", str(tmp_path / "cells"), "--check"]
    assert run(capsys, *argv)[0] == 0
    assert run(capsys, *argv, "--strict")[0] == 1


def test_slurm_measures_nothing(tmp_path, capsys):
    code, _ = run(capsys, *STEP, "--slurm", str(tmp_path / "job.sh"))
    assert code == 0
    text = (tmp_path / "job.sh").read_text()
    assert "groundup bench step --size tiny --context 8" in text
    assert "--slurm" not in text
    assert "gres" not in text


def test_help_lists_everything(capsys):
    code, streams = run(capsys)
    assert code == 0
    for name in ("step", "attention", "norm", "optimizer", "mixed-precision", "diff", "table", "check"):
        assert f"\n  bench {name} " in streams.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stepp"], 'did you mean "step"'),
        (["diff", "a.json", "b.json"], "no such result file"),
        (["table"], "RESULTS"),
        ([*STEP, "--time-limit", "0"], "--time-limit is 0"),
        ([*STEP, "--deadline-seconds", "-1"], "--deadline-seconds is -1"),
        (["step", "--plot", "x.jpg", "--device", "cpu"], "--plot x.jpg"),
        (["mixed-precision", "--plot", "x.png", "--device", "cpu"], "mixed-precision has nothing to draw"),
        ([*STEP, "--time-limit", "inf"], "--time-limit is inf"),
        ([*STEP, "--deadline-seconds", "nan"], "--deadline-seconds is nan"),
    ],
)
def test_wrong_commands_are_one_line(argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        dispatch(["bench", *argv])
    assert words in str(error.value)
    assert "\n" not in str(error.value)
