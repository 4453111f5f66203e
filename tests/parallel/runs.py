"""Whole training runs in one process group, for test_runs.py and test_shards.py."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
from tiny_runs import VOCAB, write_tokens

from groundup.cli import main
from groundup.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.parallel import launch
from groundup.parallel.ddp import OverlapDDP
from groundup.parallel.engine import parallelize
from groundup.parallel.processes import World, connect, disconnect, this_world
from groundup.train import train
from groundup.train.job import Job, build
from groundup.train.resume import at_world_size, save, start
from groundup.train.run_directory import RunDirectory

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bucketed": ({}, {}),
    "naive": ({"data": "naive"}, {}),
    "zero1": ({"optimizer": "zero1", "bucket_mb": 0.02}, {}),
    "fsdp": ({"data": "fsdp"}, {}),
    "muon": ({"optimizer": "zero1"}, {"name": "muon"}),
    "torch-ddp": ({"data": "torch-ddp"}, {}),
    "torch-fsdp2": ({"data": "torch-fsdp2"}, {}),
    "dcp": ({"data": "torch-fsdp2", "checkpoint": "dcp"}, {}),
    "dcp-bf16": ({"data": "torch-fsdp2", "checkpoint": "dcp"}, {"master_weights": True}),
    "bucketed-bf16": ({}, {"master_weights": True}),
    "zero1-bf16": ({"optimizer": "zero1", "bucket_mb": 0.02}, {"master_weights": True}),
    "fsdp-bf16": ({"data": "fsdp"}, {"master_weights": True}),
    "torch-fsdp2-bf16": ({"data": "torch-fsdp2"}, {"master_weights": True}),
    "zero1-fp16": ({"optimizer": "zero1", "bucket_mb": 0.02}, {}),
    "fsdp-fp16": ({"data": "fsdp"}, {}),
    "bucketed-fp16": ({}, {}),
}
"""Name → fields of [parallel] and [optim]; the end of the name gives the precision."""
PRECISIONS = {"bf16": "bf16-pure", "fp16": "fp16-mixed"}


def config(tokens: Path, engine: str, **changes: Any) -> RunConfig:
    """12 sequences a step, which 1, 2, 3 and 4 processes can share."""
    parallel, optim = ENGINES[engine]
    shape = ModelConfig(vocab_size=VOCAB, context_length=32, d_model=20, n_layers=2, n_heads=2, d_ff=34)
    precision: Any = PRECISIONS.get(engine.rpartition("-")[2], "fp32")
    loop = TrainConfig(steps=6, micro_batch_size=3, global_batch_size=12, seed=7, device="cpu", precision=precision)
    loop = replace(loop, eval_every=3, eval_batches=5, save_every=3, keep_last=0, **changes)
    # A clip that every step feels, so that a norm over one shard only would show.
    moves = replace(OptimConfig(lr=3e-3, warmup_steps=2, grad_clip=0.1), **optim)
    return RunConfig(shape, moves, loop, DataConfig(path=str(tokens)), ParallelConfig(**parallel))


def train_all(
    tokens: Path, out: Path, engines: list[str], pairs: Sequence[tuple[str, str]] = (), apart: Path | None = None
) -> dict[str, Any]:
    """Train with each engine; then load and save for each pair, into out/again; then `differing` in `apart`."""
    torch.set_num_threads(1)
    world = this_world()
    connect(world, torch.device("cpu"), timeout=240)
    for engine in engines:
        assert not train(config(tokens, engine), out / engine).interrupted
    take_over(world, out, out / "again", pairs)
    found = differing(tokens, apart, out / "bucketed", world.rank) if apart else {}
    disconnect()
    return found


def reload_all(out: Path, again: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """take_over in a process group of its own."""
    torch.set_num_threads(1)
    world = this_world()
    if world.size > 1:
        connect(world, torch.device("cpu"), timeout=240)
    take_over(world, out, again, pairs)
    disconnect()


def take_over(world: World, out: Path, again: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Load what `saved` left with the engine `loads` at this world size, and save it at once."""
    for saved, loads in pairs:
        run = RunDirectory(out / saved)
        wanted = replace(at_world_size(run.load_config(), world.size), parallel=ParallelConfig(**ENGINES[loads][0]))
        job = build(wanted)
        step, _ = start(job, run, True, lambda line: None, {})
        target = RunDirectory(again / f"{saved}-{loads}-{world.size}")
        target.checkpoints.mkdir(parents=True, exist_ok=True)
        save(job, target, step, {})


def go_on(tokens: Path, out: Path, engine: str) -> None:
    """Resume a run for three more steps."""
    torch.set_num_threads(1)
    assert not train(config(tokens, engine), out / engine, resume=True).interrupted


def with_shards(tokens: Path, out: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """All that test_shards.py asks of one process group of two, which ends when rank 1 is killed while it saves."""
    torch.set_num_threads(1)
    world = this_world()
    connect(world, torch.device("cpu"), timeout=240)
    for engine in ("torch-fsdp2", "dcp"):
        assert not train(config(tokens, engine), out / engine).interrupted
    take_over(world, out, out / "again", pairs)
    wanted = config(tokens, "dcp")  # FSDP2 leaves an evaluation with some weights whole
    best = replace(wanted, train=replace(wanted.train, steps=3, eval_every=2, save_every=0, keep_best=True))
    plain = replace(wanted, train=replace(wanted.train, steps=3, eval_every=0, save_every=2))
    for name, changed in (("best", best), ("plain", plain)):
        assert not train(changed, out / name).interrupted
    if world.rank == 0:
        for name in ("on", "full", "killed"):
            shutil.copytree(out / "dcp", out / name / "dcp")
            newest = out / name / "dcp" / "checkpoints" / "step-00000006"
            if name == "on":  # of the files that rank 1 reads for its checksum
                shards = newest / "optimizer.dcp" / "__1_0.distcp"
                shards.write_bytes(bytes(shards.stat().st_size))
            else:
                shutil.rmtree(newest)
    torch.distributed.barrier()
    assert not train(config(tokens, "dcp"), out / "on" / "dcp", resume=True).interrupted
    real = dcp.FileSystemWriter.write_data

    def no_room(self: Any, *arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write_and_die(self: Any, *arguments: Any) -> Any:
        if "optimizer" in str(self.path):  # the weights are on disk
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    dcp.FileSystemWriter.write_data = no_room if world.rank == 1 else real  # type: ignore[method-assign]
    try:
        train(config(tokens, "dcp"), out / "full" / "dcp", resume=True)
    except UserError as error:
        (out / f"no-room-{world.rank}").write_text(str(error))
    dcp.FileSystemWriter.write_data = write_and_die if world.rank == 1 else real  # type: ignore[method-assign]
    train(config(tokens, "dcp"), out / "killed" / "dcp", resume=True)


def differing(tokens: Path, out: Path, saved: Path, rank: int) -> dict[str, Any]:
    """How many steps a length in tokens takes; what this rank says where the ranks differ.

    Each has a directory of its own in `out`, as on machines that share no file system; rank 0's holds the run `saved`.
    """
    alike, found = config(tokens, "bucketed"), {}
    length = replace(alike.train, steps=0, tokens=12 * 32 * 6, global_batch_size=0, eval_every=0, save_every=0)
    found["steps"] = train(replace(alike, train=length), out / "length").step
    home = out / str(rank)
    home.mkdir()
    os.chdir(home)
    write_tokens(Path("tokens"), seed=rank)
    found["tokens"] = refusal(replace(alike, data=DataConfig(path="tokens")), out / "refused")
    with patch("groundup.train.device.choose_precision", lambda *_: ("fp32", "bf16-mixed")[rank]):
        found["precision"] = refusal(replace(alike, train=replace(alike.train, precision="auto")), out / "refused")
    if rank == 0:
        shutil.copytree(saved, "run")
    with patch("groundup.train.checkpoint.SHOWN_WITHIN", 1.0), redirect_stderr(StringIO()) as said:
        found["resume"] = main(["train", "--out", "run", "--resume"]), said.getvalue()
    return found


def refusal(wanted: RunConfig, out: Path) -> str:
    try:
        train(wanted, out)
    except UserError as error:
        return str(error)
    return "it trained"


def compile_all(tokens: Path, out: Path, engines: list[str]) -> dict[str, tuple[int, int, list[str]]]:
    """`compiled` with each engine."""
    torch.set_num_threads(1)
    connect(this_world(), torch.device("cpu"), timeout=240)
    found = {engine: compiled(tokens, engine, out / engine) for engine in engines}
    disconnect()
    return found


def compiled(tokens: Path, engine: str, out: Path) -> tuple[int, int, list[str]]:
    """Train with compiled blocks: graphs, breaks, and what happened in each step's last backward until the first block
    was through: "l" for a reduction that was launched.
    """
    wanted = config(tokens, engine, compile=True)
    wanted = replace(wanted, parallel=replace(wanted.parallel, bucket_mb=0.02))
    log: list[str] = []

    def noted(letter: str, function: Any) -> Any:
        return lambda *args, **keywords: (log.append(letter), function(*args, **keywords))[1]

    def on_embedding(_module: Any, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            log.append("f")
            output.register_hook(lambda _: log.append("b"))

    def watched(model: TransformerLM, *args: Any) -> Any:
        model.token_embeddings.register_forward_hook(on_embedding)
        return parallelize(model, *args)

    from torch._dynamo.utils import counters  # costs seconds

    torch.compiler.reset()
    counters.clear()
    with (
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        patch.object(dist, "reduce_scatter_tensor", noted("l", dist.reduce_scatter_tensor)),
        patch.object(OverlapDDP, "_all_reduce", noted("l", OverlapDDP._all_reduce)),
        patch("groundup.train.job.parallelize", watched),
        patch.object(Job, "clip_grad_norm", noted("e", Job.clip_grad_norm)),
    ):
        train(wanted, out)
    last = [step.rpartition("f")[2].partition("b")[0] for step in "".join(log).split("e")[:-1]]
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), last


def spawned(world: int, function: Any, *arguments: Any) -> list[Any]:
    return launch.spawn(function, world, *arguments)
