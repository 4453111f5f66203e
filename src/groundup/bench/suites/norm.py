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

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, numbers, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import buffer_sets, on_side_stream, summary, time_kernel
from groundup.bench.precision import DTYPES, tensor_name
from groundup.bench.sweep import repetitions
from groundup.errors import optional_package
from groundup.model.layers import RMSNorm

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
    return grid(
        repetitions(options),
        precision=words(options.precision, "--precision", tuple(DTYPES)),
        rows=numbers(options.rows, "--rows"),
        hidden=numbers(options.hidden, "--hidden"),
        implementation=words(options.implementation, "--implementation", IMPLEMENTATIONS),
    )


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


def run(parameters: Parameters, device: torch.device) -> Measurement:
    dtype = DTYPES[parameters["precision"]]
    rows, hidden = parameters["rows"], parameters["hidden"]
    gain = nn.Parameter(torch.rand(hidden, device=device, dtype=dtype))
    bias = nn.Parameter(torch.rand(hidden, device=device, dtype=dtype))
    norm = norm_function(parameters["implementation"], hidden, gain, bias)
    gains = (gain, bias) if parameters["implementation"] == "layer_norm" else (gain,)
    one_pass = rows * hidden * dtype.itemsize
    sets = buffer_sets(2 * one_pass, device)
    inputs = [torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(sets)]
    gradients = [torch.randn(rows, hidden, device=device, dtype=dtype) for _ in range(sets)]
    counts = (parameters["warmup"], parameters["steps"], device)

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
    stamp = {"dtype": tensor_name(dtype), "grad_mode": "forward no_grad, backward grad"}
    stamp |= {"clocks": back.clocks, "buffer_sets": str(sets)}
    stamp["method"] = fore.method if fore.method == back.method else f"forward {fore.method}; backward {back.method}"
    return Measurement(metrics, stamp)


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: parameters["precision"],
    columns={
        "forward, ms": "time.forward",
        "forward, GB/s": "bandwidth.forward",
        "backward, ms": "time.backward",
        "backward, GB/s": "bandwidth.backward",
    },
    plot_x="hidden",
    plot_y="bandwidth.forward",
)
