"""What half precision does to a sum, and which dtype each tensor of a toy model has under autocast.

The course's two exercises. accumulation: 0.01 added 1000 times in four ways. float16 cannot hold the sum (its
spacing near 10 is 0.0078); a float32 sum of float16 terms keeps the term's own rounding (0.010002), so it is off, and
the same whether the term is cast before or inside the addition. autocast: two linear layers around a LayerNorm.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, words
from groundup.bench.cells import Parameters
from groundup.bench.precision import tensor_name
from groundup.bench.sweep import resolve_device

PARTS = ("accumulation", "autocast-fp16", "autocast-bf16")


@dataclass(frozen=True)
class Options(SweepOptions):
    part: str = ",".join(PARTS)
    """accumulation, autocast-fp16, autocast-bf16."""


def cells(options: Options) -> list[Parameters]:
    last = {"seed": options.seed, "device": resolve_device(options.device)}
    return grid(last, part=words(options.part, "--part", PARTS))


def run(parameters: Parameters, device: torch.device) -> Measurement:
    if parameters["part"] == "accumulation":
        return Measurement(accumulate(device), {"dtype": "float32, float16", "grad_mode": "no_grad"})
    dtype = torch.float16 if parameters["part"] == "autocast-fp16" else torch.bfloat16
    return Measurement(dtypes(device, dtype), {"dtype": f"{tensor_name(dtype)} autocast, float32 weights"})


def accumulate(device: torch.device) -> dict[str, float]:
    """0.01 added 1000 times: sum and term in float32; both in float16; float16 term onto float32, twice."""
    half, single = torch.float16, torch.float32

    def total(sum_dtype: torch.dtype, term_dtype: torch.dtype, cast: bool = False) -> float:
        result = torch.tensor(0, dtype=sum_dtype, device=device)
        term = torch.tensor(0.01, dtype=term_dtype, device=device)
        for _ in range(1000):
            result += term.to(sum_dtype) if cast else term
        return result.item()

    return {
        "sum.fp32_of_fp32": total(single, single),
        "sum.fp16_of_fp16": total(half, half),
        "sum.fp32_of_fp16": total(single, half),
        "sum.fp32_of_fp16_cast": total(single, half, cast=True),
    }


class ToyModel(nn.Module):
    """fc1 → relu → LayerNorm → fc2, torch's own layers: the exercise is about torch's autocast rules."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.fc1(x).relu()))


def dtypes(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Name of the dtype of parameters, intermediate results, loss and gradients."""
    seen: dict[str, Any] = {}
    with device:
        model = ToyModel()
        x, target = torch.randn(4, 16), torch.randint(5, (4,))
    for name in ("fc1", "ln"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({f"dtype.{name}": tensor_name(out.dtype)})
        )
    with torch.autocast(device.type, dtype=dtype):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, target)
    loss.backward()
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return {
        "dtype.parameters": tensor_name(model.fc1.weight.dtype),
        **seen,
        "dtype.logits": tensor_name(logits.dtype),
        "dtype.loss": tensor_name(loss.dtype),
        "dtype.gradients": ", ".join(sorted(map(tensor_name, gradients))),
    }


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    columns={
        "fp32 += fp32": "sum.fp32_of_fp32",
        "fp16 += fp16": "sum.fp16_of_fp16",
        "fp32 += fp16": "sum.fp32_of_fp16",
        "fp32 += cast fp16": "sum.fp32_of_fp16_cast",
        "parameters": "dtype.parameters",
        "fc1": "dtype.fc1",
        "LayerNorm": "dtype.ln",
        "logits": "dtype.logits",
        "loss": "dtype.loss",
        "gradients": "dtype.gradients",
    },
    seconds_per_cell=10.0,
)
