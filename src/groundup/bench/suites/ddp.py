"""Data parallelism: step time of every engine, and how much of its communication nothing hides.

The course's ladder (naive, flat, overlap, buckets) with ZeRO-1, FSDP and PyTorch's own engines beside it, and `none`,
in which every rank trains for itself. Exposed communication is read from a profiler's trace: the time in which a
communication kernel runs and nothing else does; a subtraction of two step times would not tell it from computation
that overlapped communication has slowed.
"""

from dataclasses import dataclass
from functools import partial

import torch

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, numbers, without_repeats, words
from groundup.bench.cells import Parameters
from groundup.bench.parallel import ENGINES, Setting, at_context, in_ranks, measure_step, ranks_of
from groundup.bench.precision import dtype_name
from groundup.bench.sweep import repetitions
from groundup.config import SIZES, size

BUCKETS = ("bucketed", "zero1", "torch-ddp")
"""Engines that a bucket size means something to."""


@dataclass(frozen=True)
class StepOptions(SweepOptions):
    """A training step on several processes."""

    size: str = "small"
    """Named model sizes."""
    processes: str = ""
    """Numbers of processes on this machine; empty: all GPUs (2 on a CPU)."""
    batch: str = "4"
    """Sequences a process."""
    context: str = "128"
    """Context lengths in tokens."""
    precision: str = "fp32"
    """fp32; bf16 (autocast, FSDP gathers bf16)."""
    compile: str = "no"
    """no; blocks (each block, and the head with the loss)."""
    warmup: int = 5
    """Untimed steps."""
    steps: int = 10
    """Timed steps, one right after the other."""


@dataclass(frozen=True)
class Options(StepOptions):
    engine: str = "none,naive,flat,overlap,bucketed,torch-ddp"
    """none, naive, flat, overlap, bucketed, zero1, fsdp, torch-ddp, torch-fsdp2."""
    bucket_mb: str = "1,10,100,1000"
    """Bucket sizes in MiB, for the engines that have buckets."""


def cells(options: Options) -> list[Parameters]:
    last = repetitions(options)
    found = grid(
        last,
        size=words(options.size, "--size", tuple(SIZES)),
        processes=ranks_of(options.processes, last["device"], last=True),
        precision=words(options.precision, "--precision", ("fp32", "bf16")),
        compile=words(options.compile, "--compile", ("no", "blocks")),
        batch_size=numbers(options.batch, "--batch"),
        context_length=numbers(options.context, "--context"),
        engine=words(options.engine, "--engine", ENGINES),
        bucket_mb=numbers(options.bucket_mb, "--bucket-mb"),
    )
    return without_repeats(cell if cell["engine"] in BUCKETS else cell | {"bucket_mb": 0} for cell in found)


def setting_of(parameters: Parameters) -> Setting:
    return Setting(
        at_context(size(parameters["size"]), parameters["context_length"]),
        parameters["engine"],
        parameters["bucket_mb"] or 50.0,
        parameters["batch_size"],
        parameters["precision"],
        compile=parameters["compile"] == "blocks",
        warmup=parameters["warmup"],
        steps=parameters["steps"],
        seed=parameters["seed"],
    )


def run(parameters: Parameters, device: torch.device) -> Measurement:
    metrics = in_ranks(parameters, partial(measure_step, setting_of(parameters)))
    method = "steps back to back; communication from a trace of two steps"
    return Measurement(metrics, {"dtype": dtype_name(parameters["precision"]), "method": method})


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    columns={
        "step, ms": "time.step",
        "communication, ms": "time.communication",
        "exposed, ms": "time.exposed",
        "exposed share": "exposed_share",
        "idle, ms": "time.idle",
        "peak, GiB": "memory.peak",
        "tokens/s": "tokens_per_second",
    },
    plot_x="bucket_mb",
    plot_y="time.step",
    seconds_per_cell=60.0,
)
