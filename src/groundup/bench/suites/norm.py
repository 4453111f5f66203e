"""RMSNorm against LayerNorm, forward and backward, as bandwidth.

A norm does a handful of operations an element, so the floor is the memory traffic: forward reads x and writes y (2
passes), backward reads x and dy and writes dx (3 passes). GB/s are those bytes over the time, gains left out: an
implementation that reads x twice shows as slow, not as fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groundup.bench.benchmark import Benchmark, Column, Measurement, SweepOptions, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import buffer_sets, on_side_stream, summary, time_kernel
from groundup.bench.sweep import repetitions
from groundup.errors import optional_package
from groundup.model.layers import RMSNorm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TORCH = ("eager", "compiled", "layer_norm", "rms_norm")
IMPLEMENTATIONS = (*TORCH, "kernel", "liger")


@dataclass(frozen=True)
class Options(SweepOptions):
    implementation: str = ",".join(TORCH)
    """eager, compiled, kernel: this package's RMSNorm, plain, under torch.compile, in Triton; layer_norm: torch's
    LayerNorm; rms_norm: torch's F.rms_norm; liger: Liger's, where it is installed."""
    hidden: str = "1024,2048,4096,8192"
    """Widths."""
    rows: str = "32768"
    """Rows (the course's 2024 edition asks for 50000)."""
    precision: str = "bf16"
    """Dtype of all tensors: fp32, bf16."""
    warmup: int = 3
    """Untimed samples before the timed ones."""
    steps: int = 20
    """Timed samples."""


def cells(options: Options) -> list[Parameters]:
    """Every combination, the implementations of one shape next to each other."""
    last = repetitions(options)
    return [
        {
            "implementation": implementation,
            "precision": precision,
            "rows": rows,
            "hidden": hidden,
            **last,
        }
        for precision in words(options.precision, "--precision", tuple(DTYPES))
        for rows in numbers(options.rows, "--rows")
        for hidden in numbers(options.hidden, "--hidden")
        for implementation in words(options.implementation, "--implementation", IMPLEMENTATIONS)
    ]


def norm_function(name: str, hidden: int, gain: nn.Parameter, bias: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """x (rows, hidden) → normalised x of the same dtype; LayerNorm has a bias, as torch's module has."""
    if name == "layer_norm":
        return lambda x: nn.functional.layer_norm(x, (hidden,), gain, bias, 1e-5)
    if name == "rms_norm":
        return lambda x: nn.functional.rms_norm(x, (hidden,), gain, 1e-5)
    if name == "liger":
        apply = optional_package("liger_kernel.ops.rms_norm", "liger").LigerRMSNormFunction.apply
        # In place it would write dx over dy, which a second backward pass needs.
        return lambda x: apply(x, gain, 1e-5, 0.0, "llama", False)
    norm = RMSNorm(hidden, kernels="triton" if name == "kernel" else "reference")
    norm.weight = gain
    return torch.compile(norm, dynamic=False) if name == "compiled" else norm


def run(parameters: Parameters) -> Measurement:
    """Time and bandwidth of one shape and implementation."""
    device = torch.device(str(parameters["device"]))
    dtype = DTYPES[str(parameters["precision"])]
    rows, hidden = int(parameters["rows"]), int(parameters["hidden"])
    gain = nn.Parameter(torch.rand(hidden, device=device, dtype=dtype))
    bias = nn.Parameter(torch.rand(hidden, device=device, dtype=dtype))
    norm = norm_function(str(parameters["implementation"]), hidden, gain, bias)
    gains = (gain, bias) if parameters["implementation"] == "layer_norm" else (gain,)
    one_pass = rows * hidden * dtype.itemsize
    sets = buffer_sets(2 * one_pass, device)
    inputs = [torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(sets)]
    gradients = [torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(sets)]
    counts = (int(parameters["warmup"]), int(parameters["steps"]), device)

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return norm(inputs[i])

    fore = time_kernel(forward, sets, *counts)
    outputs = on_side_stream(lambda: [norm(x) for x in inputs], device)

    def backward(i: int) -> Any:
        return torch.autograd.grad(outputs[i], (inputs[i], *gains), gradients[i], retain_graph=True)

    back = time_kernel(backward, sets, *counts)
    times = {"forward": summary(fore.phases["total"]), "backward": summary(back.phases["total"])}
    metrics: dict[str, Any] = {f"time.{name}": times[name] for name in times}
    metrics["bandwidth.forward"] = 2 * one_pass / times["forward"]["median"] / 1e6
    metrics["bandwidth.backward"] = 3 * one_pass / times["backward"]["median"] / 1e6
    stamp = {"dtype": str(dtype).removeprefix("torch."), "grad_mode": "forward no_grad, backward grad"}
    stamp |= {"step": "steady", "clocks": back.clocks, "buffer_sets": str(sets)}
    stamp["method"] = fore.method if fore.method == back.method else f"forward {fore.method}; backward {back.method}"
    return Measurement(metrics, stamp)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: parameters["precision"],
    columns=(
        Column("forward, ms", "time.forward", "ms"),
        Column("forward, GB/s", "bandwidth.forward", "GB/s"),
        Column("backward, ms", "time.backward", "ms"),
        Column("backward, GB/s", "bandwidth.backward", "GB/s"),
    ),
    plot_x="hidden",
    plot_y="bandwidth.forward",
)
