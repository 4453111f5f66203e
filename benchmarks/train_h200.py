"""A whole training step beside a plain PyTorch GPT's, on the GPUs there are: tokens a second, memory, equal losses.

    python benchmarks/train_h200.py OUT [section ...] [--tokens DIR] [--seconds 580]
    sections: 124m 350m 1.5b memory losses profile-124m profile-350m turns-124m turns-350m

The peer is GPT-2's shape as most trainers write it: torch.nn layers, SDPA's flash attention, torch.compile of the whole
model, bf16 autocast, fused AdamW, full logits. Ours has the same parameters and FLOPs to 2% and the same batch of
random tokens. Each model runs in a process of its own; 20 steps after 7, back to back as in training, an event after
each: the median. `profile-SIZE` lists the kernels of a step. `turns-SIZE` is for differences of a few percent: one
process, every form compiled, then ten steps of each by turns (FORMS; nine minutes a size, most of it compiling).
`losses` trains the stories' shape on the token directory --tokens (docs/stories.md), reference against kernels.

A GPU has one job at a time. OUT/train.jsonl gets every row at once, OUT/train.json what they come to. A second call
with the same OUT leaves out the jobs that are done, and adds its rounds to those of a `turns` that was not. No job
begins when --seconds leave too little for it. Without a GPU the size `tiny` tries the script:
turns-tiny profile-tiny tiny losses-tiny.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_jobs import append, exit_on_signals, gpus, read, start, stop
from train_jobs import FORMS, LOSSES, SIZES, VARIANTS

from groundup.files import write_atomic

LIMITS = {"step_row": (60, 150), "profile_row": (60, 200), "losses_rows": (60, 150), "turns_rows": (40, 570)}
"""Function → seconds that must be left to begin it, seconds it may take."""


@dataclass
class Job:
    """One process."""

    name: str
    function: str
    arguments: list[Any]
    process: subprocess.Popen | None = None
    log: Path = Path()
    gpu: str = ""
    end: float = 0.0


def plan(sections: list[str], tokens: str, forms: list[str]) -> Iterator[Job]:
    for section in sections:
        what, _, size = section.rpartition("-")
        if section in SIZES:
            for variant in [name for name in VARIANTS if name != "reference"]:
                yield Job(f"{section}: {variant}", "step_row", [section, variant])
        elif what == "profile" and size in SIZES:
            for variant in ("plain GPT", "ours"):
                yield Job(f"{section}: {variant}", "profile_row", [size, variant])
        elif what == "turns" and size in SIZES:
            yield Job(section, "turns_rows", [size, forms])
        elif section == "memory":
            for context, batch in ((512, 32), (1024, 16), (2048, 8)):
                for variant in ("reference", "ours, all kernels"):
                    yield Job(f"memory {context}: {variant}", "step_row", ["124m", variant, context, batch, False])
        elif section in ("losses", "losses-tiny"):
            shape = ["tiny", 4] if size == "tiny" or section == "losses-tiny" else ["stories-17m", 500]
            for variant in LOSSES if shape[0] != "tiny" else ["reference"]:
                yield Job(f"{section}: {variant}", "losses_rows", [shape[0], variant, tokens, shape[1]])
        else:
            raise ValueError(f"no section {section}")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What train.json holds: the rows, those of `turns` by form; the last of the losses."""
    found = [row for row in rows if "done" not in row and "round" not in row and "mean_loss_of_last_50" not in row]
    found += {row["job"]: row for row in rows if "mean_loss_of_last_50" in row}.values()
    return found + [row for size in SIZES for row in turned([r for r in rows if "round" in r and r["size"] == size])]


def turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a form from its rounds of all calls; `x_plain` compares within each round first."""
    plain = {(row["call"], row["round"]): row["ms"] for row in rows if row["form"] == "plain GPT"}
    found = []
    for form in dict.fromkeys(row["form"] for row in rows):
        mine = [row for row in rows if row["form"] == form]
        mine = [row for row in mine if row["round"] >= 0] or mine
        times, size = [row["ms"] for row in mine], mine[0]["size"]
        ms = statistics.median(times)
        row = {"size": size, "form": form, "ms": ms, "least": min(times), "most": max(times), "rounds": len(times)}
        row["tokens_per_second"] = SIZES[size].batch * SIZES[size].context / ms * 1e3
        ratios = [plain[at] / r["ms"] for r in mine if (at := (r["call"], r["round"])) in plain]
        if ratios:
            row["x_plain"] = statistics.median(ratios)
        found.append(row)
    return found


def work_through(waiting: list[Job], out: Path, end: float) -> None:
    """One job a GPU, in their order, until nothing fits into the time that is left."""
    path, logs = out / "train.jsonl", Path(tempfile.mkdtemp(prefix="groundup-train-"))  # few files may come back of OUT
    script, running = Path(__file__).with_name("train_jobs.py"), []
    done = {row["job"] for row in read(path) if "done" in row}
    waiting, on = [job for job in waiting if job.name not in done], gpus()
    try:
        while waiting or running:
            for gpu in on:
                left = end - time.time()
                job = next((job for job in waiting if LIMITS[job.function][0] <= left), None)
                if job and all(other.gpu != gpu for other in running):
                    waiting.remove(job)
                    job.gpu, job.end = gpu, time.time() + min(LIMITS[job.function][1], left - 10)
                    job.log = logs / f"{len(waiting)}.log"
                    command = [sys.executable, str(script), str(path), job.name, job.function]
                    job.process = start([*command, json.dumps(job.arguments), str(job.end)], gpu, job.log)
                    running.append(job)
            if not running:
                break
            time.sleep(0.2)
            for job in list(running):
                if (code := job.process.poll()) is None and time.time() < job.end + 5:
                    continue
                stop(job.process)
                running.remove(job)
                how = "out of time" if code is None else f"exit code {code}"
                if code != 0:
                    last = job.log.read_text(errors="replace").strip().splitlines()[-1:]
                    append(path, job=job.name, FAILED=how, last=last)
                write_atomic(out / "train.json", json.dumps(summary(read(path)), indent=1))
                print(f"{job.name} on GPU {job.gpu}: {how}", flush=True)
    finally:
        for job in running:
            stop(job.process)
    for job in waiting:
        print(f"{job.name}: left out, too little time is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("sections", nargs="*", default=["124m", "350m", "memory"])
    parser.add_argument("--forms", default=";".join(FORMS), help="of the sections turns, with a semicolon between them")
    parser.add_argument("--tokens", default="", help="the stories' token directory, for losses")
    parser.add_argument("--seconds", type=float, default=580.0)
    options = parser.parse_args()
    forms = options.forms.split(";")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"no form {min(unknown)}; there are {'; '.join(FORMS)}")
    try:
        jobs = [*plan(options.sections, options.tokens, forms)]
    except ValueError as error:
        parser.error(str(error))
    if any(job.function == "losses_rows" for job in jobs) and not (Path(options.tokens) / "train.npy").exists():
        parser.error(f"losses need --tokens, a directory with train.npy; {options.tokens!r} has none")
    options.out.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    work_through(jobs, options.out.resolve(), time.time() + options.seconds)
    for row in summary(read(options.out / "train.jsonl")):
        print({key: value for key, value in row.items() if key not in ("call", "kernels")})


if __name__ == "__main__":
    main()
