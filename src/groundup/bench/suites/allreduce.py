"""All-reduce alone: time and bandwidth by size, number of processes and back-end.

The course's first distributed benchmark. Bus bandwidth is 2·(W-1)/W · bytes / seconds, what one link carries in a ring:
comparable between numbers of processes, and to the hardware's figure. Five untimed calls, a barrier before each timed
one, the slowest rank's time. Started by torchrun or srun on several nodes it measures in that world instead of starting
processes of its own; rank 0 keeps the cells and prints.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.parallel import Metrics, in_ranks, measure_all_reduce, ranks_of
from groundup.bench.sweep import repetitions
from groundup.errors import UserError

BACKENDS = ("gloo-cpu", "gloo-cuda", "nccl")
KIB = 1 << 10


@dataclass(frozen=True)
class Options(SweepOptions):
    kib: str = "512,1024,10240,102400,1048576"
    """Sizes of the tensor in KiB: 512 KiB to 1 GiB."""
    processes: str = ""
    """Numbers of processes on this machine; empty: 2, 4, 6 and 8 as far as there are GPUs (2 on a CPU)."""
    backend: str = ""
    """gloo-cpu, gloo-cuda (CUDA tensors through Gloo), nccl; empty: all that this machine has."""
    warmup: int = 5
    """Untimed calls."""
    steps: int = 20
    """Timed calls."""


def cells(options: Options) -> list[Parameters]:
    last = repetitions(options, least_warmup=0)
    device = last["device"]
    backends = words(options.backend, "--backend", BACKENDS) if options.backend else list(BACKENDS)
    if device == "cpu":
        if options.backend and backends != ["gloo-cpu"]:
            raise UserError(f"--backend {options.backend} needs GPUs; on a CPU there is gloo-cpu")
        backends = ["gloo-cpu"]
    processes = ranks_of(options.processes, device)
    return grid(last, backend=backends, processes=processes, kib=numbers(options.kib, "--kib"))


def run(parameters: Parameters, device: torch.device) -> Measurement:
    metrics = in_ranks(parameters, partial(measure, parameters))
    stamp = {"dtype": "float32", "grad_mode": "no_grad", "method": "perf_counter after a barrier, slowest rank"}
    return Measurement(metrics, stamp)


def measure(parameters: Parameters, device: torch.device) -> Metrics:
    """On each rank. The ranks are connected once for all cells; a cell through Gloo has a group of its own for it."""
    backend = parameters["backend"]
    group = None if backend == "nccl" else dist.new_group(backend="gloo")
    on = torch.device("cpu") if backend == "gloo-cpu" else device
    counts = (parameters["warmup"], parameters["steps"], parameters["seed"])
    return measure_all_reduce(parameters["kib"] * KIB, on, torch.float32, *counts, group)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    columns={
        "all-reduce, ms": "time.all_reduce",
        "bus GB/s": "bandwidth.bus",
        "GB/s": "bandwidth.algorithm",
    },
    plot_x="kib",
    plot_y="bandwidth.bus",
)
