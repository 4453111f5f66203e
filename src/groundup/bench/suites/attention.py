"""Time and memory of plain attention over a grid of head widths and sequence lengths.

The course's grid: batch 8 without heads, d 16–128, N 256–16384; the eager reference materialises the (N, N) scores
and is O(N²) in memory, so the grid's far corner runs out of memory on smaller GPUs, which is a result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groundup.bench.benchmark import Benchmark, Column, Measurement, SweepOptions, at_least, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import summary, time_steps
from groundup.bench.sweep import resolve_device
from groundup.model.attention import causal_mask, scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options(SweepOptions):
    """Time and memory of plain attention over a grid of head widths and sequence lengths.

    Lists are separated by commas; every combination is one cell.
    """

    d: str = "16,32,64,128"
    """Widths of queries, keys and values."""
    context: str = "256,1024,4096,8192,16384"
    """Sequence lengths N."""
    batch: str = "8"
    """Sequences, without a heads dimension."""
    implementation: str = "eager,compiled"
    """eager: this package's reference; compiled: the same under torch.compile."""
    precision: str = "fp32"
    """Dtype of all tensors: fp32 (TF32 off), bf16."""
    causal: str = "no"
    """no, yes: whether a query sees only the keys up to its own position."""
    warmup: int = 3
    """Untimed passes before the timed ones."""
    steps: int = 20
    """Timed passes."""


def cells(options: Options) -> list[Parameters]:
    """Every combination, long sequences last within an implementation."""
    at_least(options.warmup, "--warmup", 1)
    at_least(options.steps, "--steps", 1)
    device = resolve_device(options.device)
    return [
        {
            "implementation": implementation,
            "precision": precision,
            "causal": causal == "yes",
            "batch_size": batch,
            "d": d,
            "context_length": context,
            "warmup": options.warmup,
            "steps": options.steps,
            "seed": options.seed,
            "device": device,
        }
        for implementation in words(options.implementation, "--implementation", ("eager", "compiled"))
        for precision in words(options.precision, "--precision", tuple(DTYPES))
        for causal in words(options.causal, "--causal", ("no", "yes"))
        for batch in numbers(options.batch, "--batch")
        for context in numbers(options.context, "--context")
        for d in numbers(options.d, "--d")
    ]


def run(parameters: Parameters) -> Measurement:
    """Forward and backward time of one cell, and what is held between them."""
    device = torch.device(str(parameters["device"]))
    torch.set_float32_matmul_precision("highest")
    batch, n, d = (int(parameters[name]) for name in ("batch_size", "context_length", "d"))
    dtype = DTYPES[str(parameters["precision"])]
    start = _allocated(device)
    q, k, v = (torch.randn(batch, n, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(batch, n, d, device=device, dtype=dtype)
    mask = causal_mask(n, n, device) if parameters["causal"] else None
    attend: Callable[..., Tensor] = scaled_dot_product_attention
    if parameters["implementation"] == "compiled":
        attend = torch.compile(attend, dynamic=False)
    before_backward: list[int] = []

    def step(mark: Callable[[str], None]) -> None:
        out = attend(q, k, v, mask)
        mark("forward")
        before_backward.append(_allocated(device) - start)
        torch.autograd.grad(out, (q, k, v), gradient)
        mark("backward")

    timing = time_steps(step, int(parameters["warmup"]), int(parameters["steps"]), device)
    metrics: dict[str, Any] = {f"time.{name}": summary(samples) for name, samples in timing.phases.items()}
    on_cuda = device.type == "cuda"
    metrics["memory.before_backward"] = before_backward[-1] if on_cuda else None
    metrics["memory.peak"] = torch.cuda.max_memory_allocated(device) - start if on_cuda else None
    stamp = {"dtype": str(dtype).removeprefix("torch."), "grad_mode": "grad", "step": "steady"}
    stamp |= {"method": timing.method, "clocks": timing.clocks}
    return Measurement(metrics, stamp, {} if on_cuda else {"memory": "the allocator is not measured on the CPU: null"})


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: (parameters["implementation"], parameters["precision"]),
    columns=(
        Column("forward, ms", "time.forward", "ms"),
        Column("backward, ms", "time.backward", "ms"),
        Column("before backward, GiB", "memory.before_backward", "GiB"),
        Column("peak, GiB", "memory.peak", "GiB"),
    ),
    plot_x="context_length",
    plot_y="time.forward",
)
