"""The jobs of runs_h200.py, each in a process of its own:  python benchmarks/runs_jobs.py FUNCTION ARGUMENTS-AS-JSON

The last line printed is ROW and the function's result as JSON. `work` is the directory that runs_h200.py prepared.
"""

import fcntl
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from groundup.config import RunConfig, load_toml, size  # noqa: E402
from groundup.rows import read_rows  # noqa: E402

AXES = ("norm", "rope", "ffn", "qk_norm", "softcap", "tie", "norm_decay", "optimizer", "precision", "size")
SLOW = ("precision-fp32", "size-double-depth", "precision-tf32")
"""Variations that are begun first, because they take longest."""
SETTLE = 10
"""Steps of every timed stretch that are left out."""
CLI = [sys.executable, "-m", "groundup.cli"]


def base_config(work: Path) -> RunConfig:
    """The recipe as all jobs have it; written by main()."""
    return load_toml(work / "base.toml", RunConfig)


def ablation_plan(work: Path) -> tuple[RunConfig, list[Any]]:
    """(baseline, variations): groundup's, and two other seeds, which say what a difference must exceed."""
    from groundup.train.ablate import Variation, shortened, variations

    base = shortened(base_config(work), json.loads((work / "steps.json").read_text())["ablation"])
    base = replace(base, train=replace(base.train, compile=False, eval_every=50))
    found = variations(base, AXES)
    return base, [*found, *(Variation(f"seed-{seed}", {"train.seed": seed}) for seed in (1, 2))]


def ablation(work: str) -> dict:
    """Train variations until none is left; several processes do this at once, each takes what no other has taken."""
    from groundup.train import ConsoleProgress
    from groundup.train.ablate import ablate

    base, found = ablation_plan(Path(work))
    out, took = Path(work, "ablation"), []
    for variation in sorted(found, key=lambda v: v.name not in SLOW):
        try:
            os.close(os.open(out / f"{variation.name}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        took.append(variation.name)
        try:
            rows = ablate(base, [variation], out, ConsoleProgress, print)
            failed = rows[0].failed if rows else None  # None: interrupted
        except Exception as error:  # one variation's failure is its own row
            failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if failed:
            (out / f"{variation.name}.failed").write_text(failed)
    return {"took": took}


def resume(work: str) -> dict:
    """An unbroken run beside one that is killed after step 110 and goes on from the checkpoint of step 100."""
    import torch

    runs = [Path(work, "resume", name) for name in ("whole", "broken")]
    command = [*CLI, "train", "--config", f"{work}/base.toml", "--train.steps", "200", "--optim.warmup-steps", "20"]
    command += ["--train.deterministic", "--train.save-every", "100", "--train.eval-every", "60", "--out"]
    for run in runs:
        shutil.rmtree(run, ignore_errors=True)
    subprocess.run([*command, str(runs[0])], check=True)
    process = subprocess.Popen([*command, str(runs[1])])
    while process.poll() is None and not any(row["step"] > 110 for row in read_rows(runs[1] / "metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"the run to be killed had ended by itself, with exit code {process.returncode}")
    killed_after = max(row["step"] for row in read_rows(runs[1] / "metrics.jsonl"))
    if killed_after >= 200:
        raise SystemExit("the run to be killed had done all of its 200 steps: nothing to resume")
    subprocess.run([*command, str(runs[1]), "--resume"], check=True)
    whole, broken = ([r for r in read_rows(run / "metrics.jsonl") if "loss" in r] for run in runs)
    evaluated = [[r["valid_loss"] for r in read_rows(run / "metrics.jsonl") if "valid_loss" in r] for run in runs]
    peaks = [rows[-1]["memory_gib"] for rows in (whole, broken)]
    return {
        "killed_after": killed_after,
        "compared_steps": sum(row["step"] > 100 for row in broken),
        "losses_equal": [r["loss"] for r in whole] == [r["loss"] for r in broken],
        "gradient_norms_equal": [r["grad_norm"] for r in whole] == [r["grad_norm"] for r in broken],
        "validation_equal": evaluated[0] == evaluated[1],
        "first_different_step": next(
            (a["step"] for a, b in zip(whole, broken, strict=True) if a["loss"] != b["loss"]), None
        ),
        "peak_gib_unbroken": peaks[0],
        "peak_gib_resumed": peaks[1],
        "peak_change": peaks[1] / peaks[0] - 1,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


@contextmanager
def gpu_to_itself(work: str) -> Generator[None]:
    """Inside, no other timed job of this GPU measures."""
    with open(Path(work, f"gpu-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def generate(work: str, name: str, options: list[str]) -> dict:
    """`groundup bench generate`; the cells."""
    with gpu_to_itself(work):
        out = f"{work}/{name}.json"
        subprocess.run([*CLI, "bench", "generate", *options, "--out", f"{work}/cells", "--json", out], check=True)
    found = json.loads(Path(out).read_text())["cells"]
    keys = ("size", "precision", "compile", "batch_size", "prompt_tokens", "steps")
    return {
        "cells": [
            {**{key: cell["parameters"][key] for key in keys}, "status": cell["status"], **cell["metrics"]}
            for cell in found
        ]
    }


def decode_profile(work: str, options: dict) -> dict:
    """Where the time of one cell's step goes: the whole step, the replay of its graph alone, and its kernels."""
    import torch

    from groundup.bench.suites.generate import Options, Subject, cells

    parameters = cells(Options(**options))[0]
    subject = Subject(parameters, torch.device(str(parameters["device"])))
    subject.prefill(lambda _: None)
    for _ in range(5):
        subject.step(lambda _: None)
    times = []
    with gpu_to_itself(work):
        for _ in range(40):
            start = time.perf_counter()
            subject.step(lambda _: None)
            times.append((time.perf_counter() - start) * 1e6)
        row: dict[str, Any] = {"step_us": statistics.median(times)}
        graph = subject.compiled and subject.compiled.graph
        if graph is None:
            return row
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
        for _ in range(100):
            graph.replay()
        ends[1].record()
        torch.cuda.synchronize()
        row["replay_us"] = ends[0].elapsed_time(ends[1]) * 10
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                graph.replay()
            torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)
    row["kernels_per_step"] = sum(k.count for k in kernels) / 4
    row["kernels"] = [[k.key[:80], k.count / 4, round(k.self_device_time_total / 4, 1)] for k in kernels[:25]]
    return row


def loop(work: str, model: str, deterministic: bool = False, optimizer: str = "adamw", steps: int = 0) -> dict:
    """Step times of train() and of its bare step, by turns, on one job; steps 0: only compile it."""
    from groundup.train import loop as module
    from groundup.train.ablate import shortened
    from groundup.train.device import deterministic as only_deterministic
    from groundup.train.job import Batch, build

    config = shortened(base_config(Path(work)), max(steps, 2))
    if model == "124m" and config.train.device == "cuda":
        config = replace(config, model=size("gpt2-124m"), train=replace(config.train, micro_batch_size=32))
    loop_settings = replace(config.train, eval_every=0, deterministic=deterministic)
    config = replace(config, train=loop_settings, optim=replace(config.optim, name=optimizer, lr=3e-4))
    spent = _watch(module)
    with only_deterministic(deterministic):
        job = build(config.resolve())
        read = job.read(1)
        batch = Batch(read.inputs.to(job.device), read.targets.to(job.device), read.n_valid)
        _bare(module, job, batch, 2)
        if not steps:
            return {"compiled": True}
        module.build = lambda _: job
        with gpu_to_itself(work):
            times, rows = _by_turns(work, module, job, batch, steps)
        start = time.perf_counter()
        for step in range(1, 21):
            job.read(step)
        read_ms = (time.perf_counter() - start) / 20 * 1e3
    median = {name: statistics.median(values) for name, values in times.items()}
    per_step = {name: seconds / (2 * steps) * 1e3 for name, seconds in spent.items()}
    return {
        "model": model, "deterministic": deterministic, "optimizer": optimizer, "parameters": job.parameters,
        "tokens_per_step": job.tokens_per_step, "median_ms": median,
        "mean_ms": {name: statistics.fmean(values) for name, values in times.items()},
        "loop_over_bare": median["loop"] / median["bare"] - 1,
        "wait_for_flag": median["bare"] / median["bare, no wait"] - 1,
        "tokens_per_second": job.tokens_per_step / median["loop"] * 1e3,
        "host_ms_waiting_for_loader": per_step["loader"], "host_ms_logging": per_step["log"],
        "loader_and_log_share": sum(per_step.values()) / median["loop"],
        "read_ms": read_ms, "peak_gib": rows[-1]["memory_gib"],
    }  # fmt: skip


def _by_turns(work: str, module: Any, job: Any, batch: Any, steps: int) -> tuple[dict[str, list[float]], list[Any]]:
    """Milliseconds of steps of each kind, and the rows of the last run."""
    from groundup.train import ConsoleProgress

    times: dict[str, list[float]] = {"loop": [], "bare": [], "bare, no wait": []}
    apply, train, rows = module.apply_unless, job.config.train, []
    for turn in range(2):
        name = f"{job.config.model.d_model}-{job.config.optim.name}-{train.deterministic}-{turn}-{os.getpid()}"
        out = Path(work, "loop", name)
        module.train(job.config, out, progress=ConsoleProgress())
        rows = [row for row in read_rows(out / "metrics.jsonl") if "loss" in row]
        times["loop"] += [job.tokens_per_step / row["tokens_per_second"] * 1e3 for row in rows[SETTLE:]]
        times["bare"] += _bare(module, job, batch, steps)[SETTLE:]
        module.apply_unless = lambda skip, optimizer: optimizer.step()
        times["bare, no wait"] += _bare(module, job, batch, steps)[SETTLE:]
        module.apply_unless = apply
        shutil.rmtree(out / "checkpoints")
    return times, rows


def _watch(module: Any) -> dict[str, float]:
    """Seconds that the loop's thread will have spent waiting for batches, and writing rows."""
    spent = {"loader": 0.0, "log": 0.0}
    prefetched, write = module.prefetched, module._Loop._write

    def timed(name: str, do: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return do()
        finally:
            spent[name] += time.perf_counter() - start

    def timed_batches(read: Any, first: int, last: int) -> Any:
        batches = prefetched(read, first, last)
        while (item := timed("loader", lambda: next(batches, None))) is not None:
            yield item

    module.prefetched = timed_batches
    module._Loop._write = lambda self, row: timed("log", lambda: write(self, row))
    return spent


def _bare(module: Any, job: Any, batch: Any, steps: int) -> list[float]:
    """Milliseconds of each of `steps` bare steps; on a GPU by events in its queue, as train() takes them."""
    import torch

    on_gpu = job.device.type == "cuda"

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    ends = [now()]
    for _ in range(steps):
        module.training_step(job, batch, 1e-4)
        ends.append(now())
    if on_gpu:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(ends)]
    return [(b - a) * 1e3 for a, b in pairwise(ends)]


def report(work: str, out: str) -> dict:
    """Tables and pictures of what is there."""
    from groundup.report import plot_runs
    from groundup.report.ablation import write_ablation
    from groundup.train import RunDirectory
    from groundup.train.ablate import changed, is_finished, outcome

    said: dict[str, Any] = {}
    if Path(work, "ablation").exists():
        base, found = ablation_plan(Path(work))
        rows: list[Any] = []
        for variation in found:
            run = RunDirectory(Path(work, "ablation", variation.name))
            if not run.config.exists():
                continue
            note = Path(work, "ablation", f"{variation.name}.failed")
            failed = note.read_text() if note.exists() and not is_finished(run) else None
            first = rows[0].valid_loss if rows else None
            row = outcome(variation, changed(base, variation.changes), run, failed, first)
            rows.append(replace(row, tokens_per_second=None))  # they shared a GPU
        if rows and rows[0].valid_loss is not None:
            write_ablation(rows, Path(work, "ablation"))
            for kind in ("md", "json", "png"):
                Path(out, f"ablation.{kind}").write_bytes(Path(work, "ablation", f"ablation.{kind}").read_bytes())
            draw_changes(rows, Path(out, "ablation-changes.png"))
            said["variations"] = len(rows) - 1
    runs = sorted(Path(work, "muon").glob("*/metrics.jsonl"))
    losses = {run.parent: [row["valid_loss"] for row in read_rows(run) if "valid_loss" in row] for run in runs}
    losses = {run: values for run, values in losses.items() if values}
    said["muon"] = {run.name: {"last": values[-1], "lowest": min(values)} for run, values in losses.items()}
    kinds = [
        sorted((r for r in losses if r.name.startswith(kind)), key=lambda r: losses[r][-1])
        for kind in ("adamw", "muon")
    ]
    best = [runs[0] for runs in kinds if runs]
    if best:
        plot_runs(best, Path(out, "muon-tokens.png"), x="tokens")
    Path(out, "report.md").write_text(told(json.loads(Path(work, "results.json").read_text()), said["muon"]))
    return said


def told(results: dict[str, Any], muon: dict[str, dict[str, float]]) -> str:
    """Tables and sentences for docs/training.md, of the jobs that gave a result."""
    from tabulate import tabulate

    def table(headers: str, rows: list[tuple]) -> str:
        return tabulate(rows, headers.split(" | "), tablefmt="pipe", disable_numparse=True) if rows else ""

    rows = {name: result["row"] for name, result in results.items() if result["status"] == "ok" and "row" in result}
    parts = [
        table("run | last validation loss | lowest", [(n, *(f"{x:.4f}" for x in v.values())) for n, v in muon.items()])
    ]
    if found := rows.get("resume"):
        equal = "equal" if found["losses_equal"] else "DIFFERENT"
        parts.append(
            f"killed after {found['killed_after']} steps, then {found['compared_steps']} more: losses {equal} bitwise\n"
            f"peak GiB {found['peak_gib_unbroken']:.3f}, resumed {found['peak_gib_resumed']:.3f} "
            f"({found['peak_change']:+.2%})"
        )
    loops = [(name[5:], row) for name, row in rows.items() if name.startswith("loop-")]
    headers = "run | loop, ms | bare step, ms | without the flag, ms | loader + log on the host | tokens/s | peak GiB"
    parts.append(
        table(
            headers,
            [
                (
                    *(name, *(f"{row['median_ms'][kind]:.2f}" for kind in ("loop", "bare", "bare, no wait"))),
                    *(
                        f"{row['loader_and_log_share']:.2%}",
                        f"{row['tokens_per_second']:,.0f}",
                        f"{row['peak_gib']:.2f}",
                    ),
                )
                for name, row in loops
            ],
        )
    )
    cells = [cell for name, row in rows.items() if name.startswith("generate-") for cell in row.get("cells", [])]
    generated = [
        (
            *(cell["batch_size"], cell["compile"], f"{cell['time.prefill']['median']:.2f}"),
            *(f"{cell['time.step']['median']:.3f}", f"{cell['tokens_per_second']:,.0f}"),
            "" if cell["bound_fraction"] is None else f"{cell['bound_fraction']:.1%}",
        )
        for cell in cells
        if cell["status"] == "ok"
    ]
    parts.append(table("batch | compiled | prefill, ms | step, ms | tokens/s | of the bound", generated))
    return "\n\n".join(filter(None, parts)) + "\n"


MOST = 0.5
"""Nats at which a bar is cut: one run that does not train would make all others invisible."""


def draw_changes(rows: list[Any], out: Path) -> None:
    """Bars: each variation's validation loss less the baseline's; the band is what other seeds give, if there are any.

    A bar that would leave the picture ends in an arrowhead, and the axis' label says so.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [row for row in rows[1:] if row.change is not None]
    noise = max((abs(row.change) for row in known if row.name.startswith("seed-")), default=0.0)
    bars = sorted((row for row in known if not row.name.startswith("seed-")), key=lambda row: -row.change)
    figure = Figure(figsize=(8, 1.2 + 0.26 * len(bars)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(bars):
        colour, length = ("#D55E00" if row.change > 0 else "#0072B2"), max(-MOST, min(row.change, MOST))
        axes.barh(place, length, color=colour, zorder=2)
        cut = abs(row.change) > MOST
        if cut:
            axes.plot(length, place, marker=">" if length > 0 else "<", color=colour, markersize=13, clip_on=False)
        at, beyond = (max(length, 0), place), 11 if cut and length > 0 else 4
        axes.annotate(f"{row.change:+.3f}", at, (beyond, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [row.name for row in bars])
    axes.margins(x=0.12)
    axes.tick_params(labelsize=9)
    notes = [f"grey: other seeds, ±{noise:.3f}"] if noise else []
    if any(abs(row.change) > MOST for row in bars):
        notes.append(f"bars with an arrowhead are longer than drawn (cut at {MOST:g})")
    if noise:
        axes.axvspan(-noise, noise, color="#DDDDDD", zorder=0)
    axes.axvline(0, color="#333333", linewidth=0.8, zorder=3)
    axes.set_xlabel("\n".join([f"validation loss less the baseline's {rows[0].valid_loss:.3f}, nats a token", *notes]))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out)


if __name__ == "__main__":
    row = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print("\nROW " + json.dumps(row), flush=True)
