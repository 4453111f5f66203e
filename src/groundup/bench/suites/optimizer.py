"""AdamW's update alone: ours against torch's fused and foreach, time and bandwidth.

The floor is the memory traffic: a float32 update reads parameter, gradient and two moments and writes parameter and
moments, 28 bytes a parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import allocated, peak_above, summary, time_steps
from groundup.bench.sweep import repetitions
from groundup.config import SIZES, size
from groundup.model import TransformerLM
from groundup.optim import AdamW

IMPLEMENTATIONS = ("groundup", "fused", "foreach")
BYTES_PER_PARAMETER = 28
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Options(SweepOptions):
    size: str = "small,medium"
    """Named sizes whose parameter shapes are updated."""
    implementation: str = ",".join(IMPLEMENTATIONS)
    """groundup: this package's AdamW; fused, foreach: torch.optim.AdamW's."""
    warmup: int = 3
    """Untimed updates before the timed ones; the first one makes the state."""
    steps: int = 20
    """Timed updates."""


def cells(options: Options) -> list[Parameters]:
    return grid(
        repetitions(options),
        size=words(options.size, "--size", tuple(SIZES)),
        implementation=words(options.implementation, "--implementation", IMPLEMENTATIONS),
    )


def run(parameters: Parameters, device: torch.device) -> Measurement:
    with torch.device("meta"):
        shapes = [p.shape for p in TransformerLM(size(parameters["size"])).parameters()]
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    implementation = parameters["implementation"]
    if implementation == "groundup":
        optimizer: torch.optim.Optimizer = AdamW(params, **SETTINGS)
    else:
        optimizer = torch.optim.AdamW(params, **SETTINGS, **cast(Any, {implementation: True}))

    def step(mark: Callable[[str], None]) -> None:
        optimizer.step()
        mark("update")

    timing = time_steps(step, parameters["warmup"], parameters["steps"], device)
    total = sum(p.numel() for p in params)
    times = summary(timing.phases["total"])
    metrics: dict[str, Any] = {
        "parameters.total": total,
        "time.update": times,
        "bandwidth.update": BYTES_PER_PARAMETER * total / times["median"] / 1e6,
        "memory.temporary": _temporary(optimizer, device),
    }
    return Measurement(metrics, {"dtype": "float32", "grad_mode": "no_grad"} | timing.stamp)


def _temporary(optimizer: torch.optim.Optimizer, device: torch.device) -> int | None:
    """Bytes an update needs beyond what is held before and after it."""
    if device.type != "cuda":
        return None
    held = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    optimizer.step()
    return peak_above(held, device)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: parameters["size"],
    columns={
        "parameters": "parameters.total",
        "update, ms": "time.update",
        "GB/s": "bandwidth.update",
        "temporary, GiB": "memory.temporary",
    },
    plot_x="size",
    plot_y="bandwidth.update",
)
