"""Tiny deterministic runs for this room's tests: synthetic tokens, a 256-byte vocabulary, a model of 20,000 weights."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from random import random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import groundup.files
from groundup.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from groundup.tokenizer import Tokenizer
from groundup.train import Plan, Progress, train
from groundup.train.checkpoint import OPTIMIZER, STATE, _size_and_checksum

EOT = 256
VOCAB = 257
OF_THE_CLOCK = {"tokens_per_second", "mfu", "memory_gib", "eta_seconds"}
"""Fields of a row that say how the machine did, not what was learnt."""


def synthetic_tokens(count: int, seed: int) -> np.ndarray:
    """Ids 0 … 255 that a small model can learn (each next id is one of four), the last one <|endoftext|>."""
    ids, random, token = [], seed, 1
    for _ in range(count - 1):
        random = (random * 1103515245 + 12345) % 2**31
        token = (token * 3 + (random >> 16) % 4) % 256
        ids.append(token)
    return np.array([*ids, EOT], dtype=np.uint16)


def write_tokens(
    directory: Path,
    n_train: int = 4000,
    n_valid: int = 700,
    seed: int = 1,
    specials: Sequence[str] = ("<|endoftext|>",),
) -> Path:
    """A token directory as groundup.data describes it, of one document a split."""
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], specials)
    tokenizer.save(directory)
    splits = {}
    for split, count, start in (("train", n_train, seed), ("valid", n_valid, seed + 1)):
        tokens = synthetic_tokens(count, start)
        np.save(directory / f"{split}.npy", tokens)
        np.save(directory / f"{split}.docs.npy", np.array([0], dtype=np.uint64))
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        splits[split] = {"tokens": count, "bytes": count - 1, "documents": 1, "sha256": digest}
    meta = {
        "format": "groundup-tokens-1",
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": EOT,
    }
    (directory / "meta.json").write_text(json.dumps({**meta, "dtype": "uint16", "splits": splits}))
    return directory


def tiny_config(
    directory: Path, *, model: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    """A resolved configuration of 12 steps; keywords replace fields of TrainConfig."""
    shape = ModelConfig(context_length=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64)
    loop = TrainConfig(
        steps=12, micro_batch_size=4, seed=7, device="cpu", precision="fp32", eval_every=6, eval_batches=2, save_every=3
    )
    config = RunConfig(
        model=replace(shape, **(model or {})),
        optim=replace(OptimConfig(lr=3e-3, warmup_steps=5), **(optim or {})),
        train=replace(loop, **train),
        data=DataConfig(path=str(directory)),
    )
    return config.resolve(VOCAB)


def read_metrics(out: Path, timeless: bool = True) -> list[dict[str, Any]]:
    """The rows of a run; `timeless` leaves out what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not (timeless and k in OF_THE_CLOCK)} for row in rows]


class Crash(Exception):
    """Stands for a process that dies."""


class Recorder(Progress):
    """Keeps what a run said; calls `at[step]` after that step's row."""

    def __init__(self, at: dict[int, Any] | None = None):
        self.at = at or {}
        self.notes: list[str] = []
        self.plans: list[Any] = []

    def on_plan(self, plan: Any) -> None:
        self.plans.append(plan)

    def on_note(self, line: str) -> None:
        self.notes.append(line)

    def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] in self.at:
            self.at[row["step"]]()


def crash() -> None:
    raise Crash


def drop_a_moment(checkpoint: Path, name: str) -> None:
    """Take one tensor out of a checkpoint's optimizer file, checksums and all."""
    moments = load_file(checkpoint / OPTIMIZER)
    del moments[name]
    save_file(moments, checkpoint / OPTIMIZER)
    state = json.loads((checkpoint / STATE).read_text())
    state["files"][OPTIMIZER] = _size_and_checksum(checkpoint / OPTIMIZER)
    (checkpoint / STATE).write_text(json.dumps(state))


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


def resume_slowly(config: RunConfig, out: Path, fsync_seconds: float, last: int = 0, full: float = 0.0) -> None:
    """In a process of its own: resume a run on a disk whose fsync takes its time; `out/starts` gets the first step.
    It goes no further than the row of step `last`, where it waits to be killed. A share `full` of the checkpoint's
    files finds no room.
    """
    torch.set_num_threads(1)
    real = groundup.files.fsync_path

    def fsync(path: Path) -> None:
        real(path)
        time.sleep(fsync_seconds)
        if ".step-" in str(path) and random() < full:
            raise OSError(ENOSPC, "No space left on device")

    groundup.files.fsync_path = fsync
    watcher = Recorder({last: wait_for_ever})

    def say_start(plan: Plan) -> None:
        with open(out / "starts", "a") as file:
            file.write(f"{plan.first_step}\n")

    watcher.on_plan = say_start
    train(config, out, resume=True, progress=watcher)
