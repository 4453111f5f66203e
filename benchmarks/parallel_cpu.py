"""One training run under each way of data parallelism, on CPUs with Gloo, beside one process with the same batches.

    python benchmarks/parallel_cpu.py OUT TRAIN_TEXT VALID_TEXT [--steps 200] [--json FILE]

A byte-level BPE of 2,048 tokens learnt from the second text, a model of 4 × 128, 16 windows of 128 tokens a step: two
processes with 8 each, or one process with two micro-batches of 8. Every run reads the same windows in the same order.
The rows say how far losses and final weights are from those of one process (0: the same bits) and how long the run
took, start of the processes included. PyTorch computes with one thread a process. The commands are `groundup`'s own, as
a user types them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from groundup.bench.environment import environment  # noqa: E402
from groundup.rows import read_rows  # noqa: E402

MODEL = "--model.context-length 128 --model.d-model 128 --model.n-layers 4 --model.n-heads 4"
LOOP = "--train.micro-batch-size 8 --train.global-batch-size 16 --train.device cpu --train.save-every 0 --optim.lr 2e-3"
RUNS = {
    "one process": "",
    **{name: f"--nproc 2 --parallel.data {name}" for name in ("naive", "flat", "overlap")},
    "bucketed": "--nproc 2 --parallel.data bucketed --parallel.bucket-mb 1",
}


def groundup(*arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "groundup.cli", *map(str, arguments)], env=environment, check=True)


def tokens(out: Path, train: Path, valid: Path) -> Path:
    """Token files of the two texts, made once."""
    if not (out / "tokens" / "meta.json").exists():
        groundup("tokenizer", "train", valid, "--vocab-size", 2048, "--out", out / "tokenizer")
        groundup("tokenize", train, valid, "--tokenizer", out / "tokenizer", "--out", out / "tokens")
    return out / "tokens"


def run(out: Path, data: Path, name: str, steps: int) -> dict:
    """Train one way; its facts, with the losses and the weights."""
    directory = out / name.replace(" ", "-")
    start = time.perf_counter()
    options = f"{MODEL} {LOOP} --train.steps {steps} --train.eval-every {steps} --train.eval-batches 20 {RUNS[name]}"
    groundup("train", "--data", data, "--out", directory, *options.split())
    wall = time.perf_counter() - start
    rows = read_rows(directory / "metrics.jsonl")
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return {
        "run": name,
        "options": options,
        "losses": [row["loss"] for row in rows if "loss" in row],
        "valid_loss": next(row["valid_loss"] for row in rows if "valid_loss" in row),
        "wall_seconds": round(wall, 1),
        "tokens_per_second": round(median(speeds)),
        "weights": load_file(directory / "checkpoints" / f"step-{steps:08d}" / "model.safetensors"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("valid", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    data = tokens(wanted.out, wanted.train, wanted.valid)
    runs = [run(wanted.out, data, name, wanted.steps) for name in RUNS]
    truth, shown = runs[0], sorted({1, *range(50, wanted.steps, 50), wanted.steps})
    rows = []
    for row in runs:
        apart = [abs(a - b) for a, b in zip(row["losses"], truth["losses"], strict=True)]
        weights = [(value - truth["weights"][name]).abs().max().item() for name, value in row["weights"].items()]
        row = {key: value for key, value in row.items() if key != "weights"}
        row["losses"] = {str(step): row["losses"][step - 1] for step in shown if step <= wanted.steps}
        rows.append({**row, "losses_apart": max(apart), "weights_apart": max(weights)})
        print(json.dumps(rows[-1]))
    if wanted.json:
        facts = {**environment(torch.device("cpu")), "cores": os.cpu_count(), "backend": "gloo"}
        found = {"steps": wanted.steps, "environment": facts, "rows": rows}
        wanted.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
