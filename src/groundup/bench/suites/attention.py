"""Time and memory of attention over a grid of head widths and sequence lengths: plain, our kernels, their peers.

The course's first grid, the default: batch 8 without heads, d 16–128, N 256–16384; the eager reference materialises the
(N, N) scores and is O(N²) in memory, so the grid's far corner runs out of memory on smaller GPUs, which is a result.
Its FlashAttention grid is batch 1, causal, N 128–65536, d 16–128, bf16 and fp32, for the implementations that it names.
What an implementation does not know (a width, a type, a device) ends as a cell with its error. flash-hopper leaves what
its kernels do not do, or do slower, to flash-triton; such a time is never kept under its name.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, numbers, words, yes_no
from groundup.bench.cells import Parameters
from groundup.bench.harness import allocated, peak_above, time_steps
from groundup.bench.precision import DTYPES, tensor_name
from groundup.bench.sweep import repetitions
from groundup.errors import UserError
from groundup.kernels import attention as kernel_attention
from groundup.kernels import flash_triton
from groundup.model.attention import causal_mask, scaled_dot_product_attention

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
    """yes, no: whether a backward must add in a fixed order; flash-hopper has only one that does not."""
    precision: str = "fp32"
    """Dtype of all tensors: fp32 (TF32 off), bf16."""
    causal: str = "no"
    """no, yes: whether a query sees only the keys up to its own position."""
    warmup: int = 3
    """Untimed passes before the timed ones."""
    steps: int = 20
    """Timed passes."""


def cells(options: Options) -> list[Parameters]:
    return grid(
        repetitions(options),
        implementation=words(options.implementation, "--implementation", IMPLEMENTATIONS),
        precision=words(options.precision, "--precision", tuple(DTYPES)),
        causal=yes_no(options.causal, "--causal"),
        deterministic=yes_no(options.deterministic, "--deterministic"),
        batch_size=numbers(options.batch, "--batch"),
        heads=numbers(options.heads, "--heads"),
        context_length=numbers(options.context, "--context"),
        d=numbers(options.d, "--d"),
    )


def run(parameters: Parameters, device: torch.device) -> Measurement:
    shape = [parameters[name] for name in ("batch_size", "heads", "context_length", "d")]
    dtype = DTYPES[parameters["precision"]]
    start = allocated(device)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)
    attend = implementation(parameters, device)
    before_backward: list[int] = []
    foreign = plain_phases(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient), parameters)

    def step(mark: Callable[[str], None]) -> None:
        out = attend(q, k, v)
        mark("forward")
        before_backward.append(allocated(device) - start)
        torch.autograd.grad(out, (q, k, v), gradient)
        mark("backward")

    timing = time_steps(step, parameters["warmup"], parameters["steps"], device)
    metrics = timing.metrics | {"memory.peak": peak_above(start, device)}
    metrics["memory.before_backward"] = before_backward[-1] if device.type == "cuda" else None
    notes = {}
    for phase in foreign:
        metrics |= dict.fromkeys((f"time.{phase}", "time.total", "memory.peak"))
        notes[phase] = "flash-triton's kernels did this one, so nothing that it is part of is kept"
    return Measurement(metrics, {"dtype": tensor_name(dtype)} | timing.stamp, notes)


def plain_phases(step: Callable[[], Any], parameters: Parameters) -> list[str]:
    """Phases of flash-hopper's cell that flash-triton's kernels did. Raises UserError when they did both."""
    if parameters["implementation"] != "flash-hopper":
        return []
    step()  # the first one compares the two kernels with each other
    with plain_kernels() as used:
        step()
    if len(used) == 2:
        shape = ", ".join(f"{name} {parameters[name]}" for name in ("context_length", "d", "precision"))
        raise UserError(
            f"flash-hopper leaves this cell to flash-triton ({shape}): its kernels do not do it or are slower; "
            "--implementation flash-triton measures what runs"
        )
    return sorted(used)


@contextmanager
def plain_kernels() -> Generator[set[str]]:
    """The phases, "forward" and "backward", that flash-triton's kernels do inside the block."""
    used: set[str] = set()
    usual = {phase: getattr(flash_triton, f"attention_{phase}") for phase in ("forward", "backward")}

    def seen(phase: str, *arguments: Any) -> Any:
        used.add(phase)
        return usual[phase](*arguments)

    try:
        for phase in usual:
            setattr(flash_triton, f"attention_{phase}", partial(seen, phase))
        yield used
    finally:
        for phase, function in usual.items():
            setattr(flash_triton, f"attention_{phase}", function)


def implementation(parameters: Parameters, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What a cell measures, as a function of q, k and v, each (batch, heads, N, d)."""
    name, causal, n = parameters["implementation"], parameters["causal"], parameters["context_length"]
    if name in KERNELS:
        return partial(
            kernel_attention, causal=causal, backend=name, deterministic=parameters.get("deterministic", True)
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
    columns={
        "forward, ms": "time.forward",
        "backward, ms": "time.backward",
        "both, ms": "time.total",
        "before backward, GiB": "memory.before_backward",
        "peak, GiB": "memory.peak",
    },
    plot_x="context_length",
    plot_y="time.forward",
)
