"""Output head and cross entropy, forward and backward: time, and memory beyond both gradients.

Three products of N · V · d are the floor (6·N·V·d FLOPs); the eager form also holds all N · V logits three times over.
Gradients of the inputs and of the head are part of the result, so their memory is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import allocated, peak_above, reset_peak, time_steps
from groundup.bench.precision import DTYPES, tensor_name
from groundup.bench.sweep import repetitions
from groundup.errors import optional_package
from groundup.kernels import linear_cross_entropy
from groundup.model.loss import cross_entropy

IMPLEMENTATIONS = ("eager", "compiled", "chunked", "kernel", "liger")


@dataclass(frozen=True)
class Options(SweepOptions):
    implementation: str = "eager,compiled,chunked"
    """eager: this package's reference with full logits; compiled: the same under torch.compile; chunked, kernel:
    kernels.linear_cross_entropy in PyTorch, in Triton; liger: Liger's, where it is installed."""
    tokens: str = "16384"
    """Rows N."""
    vocab: str = "50304"
    """Vocabulary sizes V."""
    hidden: str = "768"
    """Widths d."""
    precision: str = "bf16"
    """Dtype of inputs and head: fp32 (TF32 off), bf16."""
    warmup: int = 3
    """Untimed passes before the timed ones."""
    steps: int = 20
    """Timed passes."""


def cells(options: Options) -> list[Parameters]:
    return grid(
        repetitions(options),
        precision=words(options.precision, "--precision", tuple(DTYPES)),
        tokens=numbers(options.tokens, "--tokens"),
        vocab_size=numbers(options.vocab, "--vocab"),
        hidden=numbers(options.hidden, "--hidden"),
        implementation=words(options.implementation, "--implementation", IMPLEMENTATIONS),
    )


def loss_function(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(x, weight, targets) → mean cross entropy of x Wᵀ."""

    def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(x @ weight.T, targets)

    if name == "liger":
        fused = optional_package("liger_kernel.transformers", "liger").LigerFusedLinearCrossEntropyLoss()
        return lambda x, weight, targets: fused(weight, x, targets)
    if name in ("chunked", "kernel"):
        return partial(linear_cross_entropy, backend="torch" if name == "chunked" else "triton")
    return torch.compile(eager, dynamic=False) if name == "compiled" else eager


def run(parameters: Parameters, device: torch.device) -> Measurement:
    dtype = DTYPES[parameters["precision"]]
    tokens, vocab, hidden = (parameters[name] for name in ("tokens", "vocab_size", "hidden"))
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)
    loss_of = loss_function(parameters["implementation"])
    torch.autograd.grad(loss_of(x, weight, targets), (x, weight))  # cuBLAS takes its workspace, a compiler compiles
    held = allocated(device)
    reset_peak(device)

    def step(mark: Callable[[str], None]) -> None:
        loss = loss_of(x, weight, targets)
        mark("forward")
        torch.autograd.grad(loss, (x, weight))
        mark("backward")

    timing = time_steps(step, parameters["warmup"], parameters["steps"], device)
    metrics = timing.metrics
    metrics["flops.rate"] = 6 * tokens * vocab * hidden / metrics["time.total"]["median"] / 1e9
    metrics["memory.beyond_gradients"] = peak_above(held + x.nbytes + weight.nbytes, device)
    return Measurement(metrics, {"dtype": tensor_name(dtype)} | timing.stamp)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: parameters["precision"],
    columns={
        "forward, ms": "time.forward",
        "backward, ms": "time.backward",
        "total, ms": "time.total",
        "TFLOP/s": "flops.rate",
        "beyond both gradients, GiB": "memory.beyond_gradients",
    },
    plot_x="tokens",
    plot_y="time.total",
)
