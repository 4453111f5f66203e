"""Time and memory of attention over a grid of head widths and sequence lengths: plain, our kernels, their peers.

The course's first grid, the default: batch 8 without heads, d 16–128, N 256–16384; the eager reference materialises the
(N, N) scores and is O(N²) in memory, so the grid's far corner runs out of memory on smaller GPUs, which is a result.
Its FlashAttention grid is batch 1, causal, N 128–65536, d 16–128, bf16 and fp32, for the implementations that it names.
What an implementation does not know (a width, a type, a device) ends as a cell with its error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from groundup.bench.benchmark import Benchmark, Column, Measurement, SweepOptions, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import allocated, memory_notes, summary, time_steps
from groundup.bench.sweep import repetitions
from groundup.kernels import attention as kernel_attention
from groundup.model.attention import causal_mask, scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = ("flash-torch", "flash-triton", "flash-hopper")
SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
IMPLEMENTATIONS = ("eager", "compiled", *KERNELS, *SDPA, "flex")


@dataclass(frozen=True)
class Options(SweepOptions):
    d: str = "16,32,64,128"
    """Widths of queries, keys and values."""
    context: str = "256,1024,4096,8192,16384"
    """Sequence lengths N."""
    batch: str = "8"
    """Sequences."""
    heads: str = "1"
    """Heads of each sequence."""
    implementation: str = "eager,compiled"
    """eager: this package's reference; compiled: the same under torch.compile; flash-torch, flash-triton, flash-hopper:
    this package's kernels; sdpa-flash, sdpa-cudnn, flex: PyTorch's own."""
    deterministic: str = "yes"
    """yes, no: whether the backward of flash-hopper adds in a fixed order."""
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
    last = repetitions(options)
    return [
        {
            "implementation": implementation,
            "precision": precision,
            "causal": causal == "yes",
            "deterministic": deterministic == "yes",
            "batch_size": batch,
            "heads": heads,
            "d": d,
            "context_length": context,
            **last,
        }
        for implementation in words(options.implementation, "--implementation", IMPLEMENTATIONS)
        for precision in words(options.precision, "--precision", tuple(DTYPES))
        for causal in words(options.causal, "--causal", ("no", "yes"))
        for deterministic in words(options.deterministic, "--deterministic", ("yes", "no"))
        for batch in numbers(options.batch, "--batch")
        for heads in numbers(options.heads, "--heads")
        for context in numbers(options.context, "--context")
        for d in numbers(options.d, "--d")
    ]


def run(parameters: Parameters) -> Measurement:
    """Forward and backward time of one cell, and what is held between them."""
    device = torch.device(str(parameters["device"]))
    torch.set_float32_matmul_precision("highest")
    shape = tuple(int(parameters[name]) for name in ("batch_size", "heads", "context_length", "d"))
    dtype = DTYPES[str(parameters["precision"])]
    start = allocated(device)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)
    attend = implementation(parameters, device)
    before_backward: list[int] = []

    def step(mark: Callable[[str], None]) -> None:
        out = attend(q, k, v)
        mark("forward")
        before_backward.append(allocated(device) - start)
        torch.autograd.grad(out, (q, k, v), gradient)
        mark("backward")

    timing = time_steps(step, int(parameters["warmup"]), int(parameters["steps"]), device)
    metrics: dict[str, Any] = {f"time.{name}": summary(samples) for name, samples in timing.phases.items()}
    on_cuda = device.type == "cuda"
    metrics["memory.before_backward"] = before_backward[-1] if on_cuda else None
    metrics["memory.peak"] = torch.cuda.max_memory_allocated(device) - start if on_cuda else None
    stamp = {"dtype": str(dtype).removeprefix("torch."), "grad_mode": "grad", "step": "steady"}
    return Measurement(metrics, stamp | timing.stamp, memory_notes(device))


def implementation(parameters: Parameters, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What a cell measures, as a function of q, k and v, each (batch, heads, N, d)."""
    name, causal, n = str(parameters["implementation"]), bool(parameters["causal"]), int(parameters["context_length"])
    if name in KERNELS:
        return partial(
            kernel_attention, causal=causal, backend=name, deterministic=bool(parameters.get("deterministic", True))
        )
    if name in SDPA:

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPA[name]):
                return kernel_attention(q, k, v, causal=causal, backend="sdpa")

        return sdpa
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        blocks = create_block_mask(visible, None, None, n, n, device=device.type) if causal else None
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        return partial(compiled, block_mask=blocks)
    plain = torch.compile(scaled_dot_product_attention, dynamic=False) if name == "compiled" else None
    return partial(plain or scaled_dot_product_attention, mask=causal_mask(n, n, device) if causal else None)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: (parameters["implementation"], parameters["precision"]),
    columns=(
        Column("forward, ms", "time.forward", "ms"),
        Column("backward, ms", "time.backward", "ms"),
        Column("both, ms", "time.total", "ms"),
        Column("before backward, GiB", "memory.before_backward", "GiB"),
        Column("peak, GiB", "memory.peak", "GiB"),
    ),
    plot_x="context_length",
    plot_y="time.forward",
)
