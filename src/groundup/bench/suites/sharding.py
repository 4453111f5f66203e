"""Sharded training: a rank's memory by what holds it, and the step's time, with and without shards.

Bytes a float32 parameter with Adam, W ranks: whole 4 + 4 + 8; zero1 4 + 4/W + 8/W; fsdp 4/W + 4/W + 8/W (plus the units
at work). Held tensors are counted exactly; what the allocator's peak has beyond them is activations and temporaries.
"""

from dataclasses import dataclass

from groundup.bench.benchmark import Benchmark
from groundup.bench.cells import Parameters
from groundup.bench.suites import ddp


@dataclass(frozen=True)
class Options(ddp.StepOptions):
    engine: str = "bucketed,zero1,fsdp,torch-fsdp2"
    """none, naive, flat, overlap, bucketed, zero1, fsdp, torch-ddp, torch-fsdp2."""


def cells(options: Options) -> list[Parameters]:
    """Every combination, with buckets of 50 MiB."""
    return ddp.cells(ddp.Options(**vars(options), bucket_mb="50"))


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=ddp.run,
    columns={
        "parameters, GiB": "memory.parameters",
        "gradients, GiB": "memory.gradients",
        "state, GiB": "memory.state",
        "activations, GiB": "memory.activations",
        "after init, GiB": "memory.after_init",
        "before step, GiB": "memory.before_step",
        "after step, GiB": "memory.after_step",
        "peak, GiB": "memory.peak",
        "step, ms": "time.step",
    },
    hidden=("bucket_mb",),
    plot_x="processes",
    plot_y="memory.state",
    seconds_per_cell=60.0,
)
