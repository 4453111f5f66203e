"""Whole training runs on one or two H200s: what docs/training.md measures.

    python benchmarks/runs_h200.py TOKENS OUT [--sections ablation,muon,resume,loop,generate] [--gpus 2]
                                              [--seconds 235] [--workers 7] [--muon-steps 1250] [--work DIR] [--tiny]

TOKENS is the stories' token directory (docs/stories.md). The sections:

ablation  the stories recipe and its variations, one change each, two of them another seed: `groundup ablate`'s runs,
          dealt out to several processes. Not compiled: a validation loss does not depend on speed.
muon      `groundup train` with AdamW and with Muon, two learning rates each, the same tokens.
resume    `groundup train`, compiled and deterministic, killed (SIGKILL) and resumed, against the unbroken run: losses
          bit for bit, peak memory.
loop      the loop of train() against the bare step of the same job in the same process, with the host's time in loader
          and log; also deterministic, also Muon. 17m is the recipe, 124m is gpt2-124m at 32 × 1,024.
generate  `groundup bench generate`, gpt2-124m, 512 tokens of prompt; where the time of a step of batch 1 goes.

Every job is a process with a time limit. Timed jobs measure alone on their GPU (with two GPUs the last one first), one
prepares while another measures; the others share one. The same command with the same --work goes on where it stopped.
OUT gets results.json after every job, and at the end report.md, pictures and, also when a signal stops it,
results.tar.gz (metrics, logs); --seconds hold all of that. On one GPU: ablation, muon and resume together about 220 s,
loop and generate 290 s. --tiny: everything on a CPU.
"""

import argparse
import json
import os
import sys
import tarfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_jobs import ROOT, exit_on_signals, gpus, start, stop

from groundup.config import DataConfig, RunConfig, dump_toml, load_toml
from groundup.files import write_atomic

SECTIONS = ("ablation", "muon", "resume", "loop", "generate")
MUON = {"adamw": ("2e-3", "4e-3"), "muon": ("2e-3", "4e-3")}
LOOPS = (
    ("17m", False, "adamw"),
    ("124m", False, "adamw"),
    ("124m", True, "adamw"),
    ("17m", True, "adamw"),
    ("17m", False, "muon"),
)
"""(model, deterministic, optimizer)"""
LAST_SECONDS = 40
"""What is kept for tables, pictures and the archive; all but five of them are the report's."""
TINY = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context_length": 32}
CLI = [sys.executable, "-m", "groundup.cli"]


@dataclass
class Job:
    """One process."""

    name: str
    command: list[str]
    limit: float
    timed: bool = False
    """Whether it measures on a GPU without others."""
    process: Any = None
    gpu: int = -1
    started: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)


def job_command(function: str, **arguments: Any) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks/runs_jobs.py"), function, json.dumps(arguments)]


def plan(args: argparse.Namespace, work: Path) -> list[Job]:
    """The jobs of the sections asked for, those of one kind in the order in which they are begun."""
    shared, timed = [], []

    def own(function: str, **arguments: Any) -> list[str]:
        return job_command(function, work=str(work), **arguments)

    if "loop" in args.sections and args.gpus > 1:  # compiled beside the others, so that the timed jobs find it done
        for on in (False, True):
            shared.append(Job(f"compile-124m-{on}", own("loop", model="124m", deterministic=on), 120))
    if "resume" in args.sections:
        shared.append(Job("resume", own("resume"), 240))
    if "ablation" in args.sections:
        shared += [Job(f"ablation-{worker}", own("ablation"), 200) for worker in range(min(args.workers, 4))]
    if "muon" in args.sections:
        for name, rates in MUON.items():
            for lr in rates:
                options = ["--optim.name", name, "--optim.lr", lr, "--out", str(work / "muon" / f"{name}-{lr}")]
                options += ["--train.steps", str(args.steps["muon"]), "--resume", "--train.eval-every"]
                options += [str(args.steps["muon"] // 10), "--optim.warmup-steps", str(args.steps["muon"] // 10)]
                shared.append(Job(f"{name}-{lr}", [*CLI, "train", "--config", f"{work}/base.toml", *options], 240))
    if "loop" in args.sections:
        for model, on, kind in LOOPS:
            steps = args.steps["loop"] // (1 if model == "17m" else 2)
            job = own("loop", model=model, deterministic=on, optimizer=kind, steps=steps)
            timed.append(Job(f"loop-{model}-{kind}{'-deterministic' if on else ''}", job, 200, True))
    if "generate" in args.sections:
        shape = {"size": "gpt2-124m", "prompt": "512", "steps": 200}
        if args.tiny:
            shape = {"size": "tiny", "prompt": "8", "precision": "fp32", "steps": 3}
        cells = []
        for batch, compiled in ((1, "yes"), (64, "no"), (64, "yes")):
            cell = {**shape, "batch": str(batch), "compile": "no" if args.tiny else compiled}
            name = f"generate-{batch}{'-compiled' if compiled == 'yes' else ''}"
            options = [word for key, value in cell.items() for word in (f"--{key}", str(value))]
            options += ["--time-limit", "150"]
            cells.append(Job(name, own("generate", name=name, options=options), 200, True))
            if batch == 1:
                cells.append(Job("generate-1-profile", own("decode_profile", options=cell), 200, True))
        timed = [*cells[:2], *timed, *cells[2:]]
    return shared + timed


def next_job(waiting: list[Job], running: list[Job], gpu: int, gpus: int, workers: int) -> Job | None:
    """What GPU `gpu` begins now: one of at most two timed jobs, or one more of those that share it.

    The last of several GPUs prefers timed jobs; any other takes them when nothing else waits.
    """
    here = [job for job in running if job.gpu == gpu]
    shared, timed = ([job for job in waiting if job.timed == kind] for kind in (False, True))
    if timed and ((gpus > 1 and gpu == gpus - 1) or not shared):
        return timed[0] if all(job.timed for job in here) and len(here) < 2 else None
    return shared[0] if shared and len(here) < workers and not any(job.timed for job in here) else None


def begin(job: Job, gpu: int, visible: list[str], work: Path) -> None:
    """Start a job on GPU number `gpu` of the visible ones."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "4")
    if not job.timed:
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    log = work / "logs" / f"{job.name}.txt"
    log.unlink(missing_ok=True)  # of an earlier call
    job.process = start(job.command, visible[gpu], log, **variables)
    job.gpu, job.started = gpu, time.monotonic()


def end(job: Job, work: Path, status: str = "") -> None:
    """Note what a job gave; one that still runs is stopped, with what it started."""
    stop(job.process)
    text = (work / "logs" / f"{job.name}.txt").read_text(errors="replace")
    rows = [line[4:] for line in text.splitlines() if line.startswith("ROW ")]
    job.result = {
        "status": status or ("ok" if job.process.returncode == 0 else f"exit code {job.process.returncode}"),
        "seconds": round(time.monotonic() - job.started, 1),
        "gpu": job.gpu,
        **({"row": json.loads(rows[-1])} if rows else {}),
    }
    if job.result["status"] != "ok":
        job.result["tail"] = text.splitlines()[-12:]
    print(f"{time.strftime('%H:%M:%S')} {job.name}: {job.result['status']}, {job.result['seconds']} s", flush=True)


def work_through(args: argparse.Namespace, jobs: list[Job], work: Path, out: Path, stop_at: float) -> dict[str, Any]:
    """Run the jobs that have no result yet; returns all results, which OUT/results.json holds at any moment."""
    path = work / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    done = {name for name, result in results.items() if result["status"] == "ok"} - {"report"}
    waiting, running = [job for job in jobs if job.name not in done], []

    def finish(job: Job, status: str = "") -> None:
        end(job, work, status)
        running.remove(job)
        results[job.name] = job.result
        for place in (path, out / "results.json"):
            write_atomic(place, json.dumps(results, indent=1) + "\n")

    try:
        while waiting or running:
            late = time.monotonic() > stop_at
            if late:
                waiting.clear()
            for job in list(running):
                over = time.monotonic() - job.started > job.limit
                if job.process.poll() is not None:
                    finish(job)
                elif late or over:
                    finish(job, "stopped at the deadline" if late else f"over {job.limit:g} s")
            for gpu in range(args.gpus):
                while (job := next_job(waiting, running, gpu, args.gpus, args.workers)) is not None:
                    waiting.remove(job)
                    begin(job, gpu, args.visible, work)
                    running.append(job)
            time.sleep(0.1)
    finally:
        for job in list(running):
            finish(job, "stopped by a signal")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sections", type=lambda text: text.split(","), default=list(SECTIONS))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=235.0)
    parser.add_argument("--work", type=Path, default=Path("/tmp/groundup-runs"))
    parser.add_argument("--workers", type=int, default=7, help="processes that share a GPU")
    parser.add_argument("--muon-steps", type=int, default=1250)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    stop_at, work = time.monotonic() + args.seconds - LAST_SECONDS, args.work.resolve()
    for directory in (args.out, work / "logs", *(work / name for name in ("ablation", "muon", "resume", "loop"))):
        directory.mkdir(parents=True, exist_ok=True)
    for claim in (work / "ablation").glob("*.claim"):
        claim.unlink()
    args.steps = {"ablation": 200, "muon": args.muon_steps, "loop": 80}
    config = load_toml(ROOT / "recipes/stories-17m.toml", RunConfig)
    train = replace(config.train, eval_batches=0, save_every=0, keep_last=1, precision="bf16-mixed", device="cuda")
    config = replace(config, data=DataConfig(path=str(args.tokens.resolve())))
    if args.tiny:
        args.steps = {"ablation": 3, "muon": 20, "loop": 30}
        config = replace(config, model=replace(config.model, **TINY))
        train = replace(train, precision="fp32", device="cpu", compile=False, micro_batch_size=2, eval_batches=2)
    write_atomic(work / "base.toml", dump_toml(replace(config, train=train)))
    write_atomic(work / "steps.json", json.dumps(args.steps))
    args.visible = gpus(args.gpus)
    if len(args.visible) < args.gpus:
        parser.error(f"--gpus {args.gpus}, but CUDA_VISIBLE_DEVICES names {len(args.visible)}")
    exit_on_signals()
    try:
        work_through(args, plan(args, work), work, args.out, stop_at)
        limit = LAST_SECONDS - 5
        last = Job("report", job_command("report", work=str(work), out=str(args.out.resolve())), limit)
        args.gpus = 1
        results = work_through(args, [last], work, args.out, time.monotonic() + limit)
        print(json.dumps({name: result["status"] for name, result in results.items()}, indent=1))
    finally:
        with tarfile.open(args.out / "results.tar.gz", "w:gz") as archive:
            for path in sorted([*work.glob("*/*/metrics.jsonl"), *work.glob("logs/*.txt"), *work.glob("*.toml")]):
                archive.add(path, path.relative_to(work))


if __name__ == "__main__":
    main()
