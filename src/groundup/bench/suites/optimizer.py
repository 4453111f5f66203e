"""AdamW's update alone: ours against torch's fused and foreach, time and bandwidth; Muon's beside torch's.

AdamW's floor is the memory traffic: a float32 update reads parameter, gradient and two moments and writes parameter and
moments, 28 bytes a parameter. Muon's is arithmetic, Newton-Schulz on every matrix of the blocks, of which alone its
cells are; `newton-schulz` is that part without momentum and weights, `newton-schulz-plain` the iteration in bf16 as
published, which ours must beat.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, grid, words
from groundup.bench.cells import Parameters
from groundup.bench.harness import allocated, peak_above, reset_peak, summary, time_steps
from groundup.bench.sweep import repetitions
from groundup.config import SIZES, size
from groundup.model import TransformerLM
from groundup.optim import AdamW, Muon
from groundup.optim.muon import newton_schulz, orthogonalize

ADAMW = ("groundup", "fused", "foreach")
IMPLEMENTATIONS = (*ADAMW, "muon", "torch-muon", "newton-schulz", "newton-schulz-plain")
NEWTON_SCHULZ_STEPS = 5
BYTES_PER_PARAMETER = 28
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Options(SweepOptions):
    size: str = "small,medium"
    """Named sizes whose parameter shapes are updated."""
    implementation: str = ",".join(ADAMW)
    """groundup: this package's AdamW; fused, foreach: torch.optim.AdamW's. Of the blocks' matrices: muon, this
    package's; torch-muon, torch.optim's; newton-schulz, newton-schulz-plain: its iteration alone, ours and in bf16."""
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
    implementation = parameters["implementation"]
    with torch.device("meta"):
        model = TransformerLM(size(parameters["size"]))
    shapes = [p.shape for p in model.parameters()]
    if implementation not in ADAMW:
        shapes = [p.shape for p in model.layers.parameters() if p.ndim == 2]
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    update = updater(implementation, params)

    def step(mark: Callable[[str], None]) -> None:
        update()
        mark("update")

    timing = time_steps(step, parameters["warmup"], parameters["steps"], device)
    total = sum(p.numel() for p in params)
    times = summary(timing.phases["total"])
    metrics: dict[str, Any] = {
        "parameters.total": total,
        "time.update": times,
        "bandwidth.update": BYTES_PER_PARAMETER * total / times["median"] / 1e6 if implementation in ADAMW else None,
        "memory.temporary": _temporary(update, device),
    }
    notes = {} if implementation in ADAMW else {"bandwidth": "bound by arithmetic, not by memory"}
    return Measurement(metrics, {"dtype": "float32", "grad_mode": "no_grad"} | timing.stamp, notes)


def updater(implementation: str, params: list[torch.nn.Parameter] | list[torch.Tensor]) -> Callable[[], Any]:
    """What a cell measures: one update of `params` from their gradients, or Newton-Schulz on the gradients."""
    grads = [cast(torch.Tensor, p.grad) for p in params]
    if implementation == "newton-schulz":
        return lambda: [orthogonalize(g, NEWTON_SCHULZ_STEPS) for g in grads]
    if implementation == "newton-schulz-plain":
        return lambda: [newton_schulz(g.bfloat16(), NEWTON_SCHULZ_STEPS).to(g.dtype) for g in grads]
    if implementation == "groundup":
        return AdamW(params, **SETTINGS).step
    if implementation in ADAMW:
        return torch.optim.AdamW(params, **SETTINGS, **cast(Any, {implementation: True})).step
    common: dict[str, Any] = {"lr": 1e-4, "momentum": 0.95, "weight_decay": 0.1}
    if implementation == "muon":
        return Muon(params, **common, steps=NEWTON_SCHULZ_STEPS, factor="match-adamw").step
    return torch.optim.Muon(params, **common, ns_steps=NEWTON_SCHULZ_STEPS, adjust_lr_fn="match_rms_adamw").step


def _temporary(update: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes an update needs beyond what is held before and after it."""
    if device.type != "cuda":
        return None
    held = allocated(device)
    reset_peak(device)
    update()
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
