"""Time and memory of a model's forward pass, backward pass and training step.

The course's first benchmark: random weights and tokens on the device, batch 4, the sizes of config/sizes.py. A step is
zero gradients (untimed), forward with the loss, backward, and for train-step AdamW's update; no clipping, no data
loading. Memory is read in one untimed step after the timed ones, with the allocator's peak reset at each phase, so a
phase's peak is its own, and the optimizer's state exists as it does in any step but the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from groundup.bench.benchmark import (
    SHAPE,
    Benchmark,
    Measurement,
    SweepOptions,
    at_least,
    config_of,
    grid,
    numbers,
    shape_fields,
    shapes,
    without_repeats,
    words,
    yes_no,
)
from groundup.bench.cells import Parameters
from groundup.bench.check import check_steps
from groundup.bench.harness import Timing, allocated, time_steps
from groundup.bench.precision import PRECISIONS, dtype_name, use_precision
from groundup.bench.sweep import resolve_device
from groundup.config.model import Attention, Kernels
from groundup.kernels.backend import runs_triton
from groundup.model import TransformerLM, count_parameters
from groundup.optim import AdamW, parameter_groups

MODES = ("forward", "forward-backward", "train-step")


@dataclass(frozen=True)
class Options(SweepOptions):
    size: str = "small"
    """Named sizes, e.g. small,medium,large,xl,2.7b; a wrong name lists them all."""
    config: str = ""
    """TOML file of a run whose [model] is measured instead of the named sizes."""
    context: str = "128,256,512"
    """Context lengths in tokens."""
    batch: str = "4"
    """Sequences a step."""
    mode: str = "forward-backward"
    """forward, forward-backward, train-step."""
    grad: str = "off"
    """For mode forward: off is torch.no_grad, on records the graph. The other modes always record it."""
    precision: str = "fp32"
    """fp32, tf32, bf16 (autocast around forward and loss, float32 weights)."""
    compile: str = "no"
    """no, model (torch.compile of the whole), blocks (of the block, once for all layers: seconds, not minutes)."""
    attention: str = "reference"
    """auto, reference, flash-torch, flash-triton, flash-hopper, sdpa."""
    deterministic: str = "yes"
    """yes, no: whether attention's backward adds in a fixed order."""
    kernels: str = "reference"
    """Of norm, RoPE, SwiGLU and loss: auto, reference, loss (the cross entropy alone), triton."""
    checkpoint: str = "0"
    """Blocks a piece of activation checkpointing holds; 0: none."""
    warmup: str = "5"
    """Untimed steps before the timed ones; 0 times the first step in a fresh process."""
    steps: int = 10
    """Timed steps."""
    check: bool = False
    """Print what the account predicts beside what was measured, with the error of each line."""
    strict: bool = False
    """With --check: exit code 1 when a line misses its target."""
    hardware: str = ""
    """GPU of the account's table for the predicted time; empty: the one measured on, from its measured peaks."""


def cells(options: Options) -> list[Parameters]:
    at_least(options.steps, "--steps", 1)
    found = []
    for cell in grid(
        {"steps": options.steps, "seed": options.seed, "device": resolve_device(options.device)},
        compile=words(options.compile, "--compile", ("no", "model", "blocks")),
        precision=words(options.precision, "--precision", PRECISIONS),
        shape=shapes(options.size, options.config).items(),
        attention=words(options.attention, "--attention", get_args(Attention)),
        attention_deterministic=yes_no(options.deterministic, "--deterministic"),
        kernels=words(options.kernels, "--kernels", get_args(Kernels)),
        checkpoint_activations=numbers(options.checkpoint, "--checkpoint", least=0),
        mode=words(options.mode, "--mode", MODES),
        grad=words(options.grad, "--grad", ("off", "on")),
        batch_size=numbers(options.batch, "--batch"),
        context_length=numbers(options.context, "--context"),
        warmup=numbers(options.warmup, "--warmup", least=0),
    ):
        name, shape = cell.pop("shape")
        cell["grad"] = cell["grad"] if cell["mode"] == "forward" else "on"
        found.append({"size": name} | shape_fields(shape) | cell)
    return without_repeats(found)


def group(parameters: Parameters) -> object:
    """One process a size and precision; one for itself where the first step counts."""
    if parameters["warmup"] == 0:
        return tuple(parameters.values())
    return parameters["size"], parameters["precision"], parameters["compile"]


def run(parameters: Parameters, device: torch.device) -> Measurement:
    subject = Subject(parameters, device)
    timing = time_steps(subject.step, parameters["warmup"], parameters["steps"], device, prepare=subject.prepare)
    tokens = parameters["batch_size"] * parameters["context_length"]
    metrics = {"parameters.total": count_parameters(subject.model)}
    metrics |= _time_metrics(timing, tokens) | subject.tensor_bytes() | subject.memory()
    metrics |= count_flops(subject, parameters)
    stamp = {"dtype": dtype_name(parameters["precision"])}
    if not subject.records:
        stamp["grad_mode"] = "no_grad"
    if not parameters["warmup"]:
        stamp["step"] = "includes the first step"
    if subject.optimizer is not None:
        stamp["optimizer"] = "kernel" if runs_triton(subject.ids) else "tensors"
    return Measurement(metrics, stamp | timing.stamp)


def _time_metrics(timing: Timing, tokens: int) -> dict[str, Any]:
    metrics = timing.metrics
    metrics["time.step"] = metrics.pop("time.total")
    metrics["time.first_step"] = timing.first["total"]
    metrics["tokens_per_second"] = tokens / metrics["time.step"]["median"] * 1e3
    return metrics


class Subject:
    """The model under measurement, its batch and its optimizer."""

    def __init__(self, parameters: Parameters, device: torch.device):
        self.device, self.mode = device, parameters["mode"]
        self.records = parameters["grad"] == "on"
        self.autocast = use_precision(parameters["precision"], device)
        self.start = allocated(self.device)
        with torch.device(device):
            self.model = TransformerLM(config_of(parameters))
            self.model.init_weights(parameters["seed"])
            shape = (parameters["batch_size"], parameters["context_length"])
            self.ids = torch.randint(self.model.config.vocab_size, shape)
            self.targets = torch.randint(self.model.config.vocab_size, shape)
        if parameters["compile"] == "model":
            self.model.compile()
        elif parameters["compile"] == "blocks":
            for block in self.model.layers:
                block.compile()
        self.optimizer = AdamW(parameter_groups(self.model, 0.1), lr=1e-4) if self.mode == "train-step" else None
        self.after_init = allocated(self.device)
        self.prepared = 0
        self.first_peak: int | None = None

    def prepare(self) -> None:
        """What comes before a step, untimed: gradients away; around the first step, its own peak of memory."""
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            if self.prepared == 0:
                torch.cuda.reset_peak_memory_stats(self.device)
            elif self.prepared == 1:
                self.first_peak = torch.cuda.max_memory_allocated(self.device) - self.start
        self.prepared += 1

    def forward(self) -> Tensor:
        with torch.set_grad_enabled(self.records), self.autocast:
            return self.model(self.ids, self.targets)

    def step(self, mark: Callable[[str], None]) -> None:
        """One step; `mark` ends each phase."""
        loss = self.forward()
        mark("forward")
        if self.mode == "forward":
            return
        loss.backward()
        mark("backward")
        if self.optimizer is not None:
            self.optimizer.step()
            mark("optimizer")

    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of the tensors themselves, as their shapes and dtypes say: exact, on any device."""
        params = list(self.model.parameters())
        state = [] if self.optimizer is None else self.optimizer.state.values()
        tensors = [value for entry in state for value in entry.values() if isinstance(value, Tensor)]
        gradients = [p.grad for p in params if p.grad is not None]
        return {
            "memory.parameters": sum(p.nbytes for p in params),
            "memory.gradients": sum(g.nbytes for g in gradients),
            "memory.optimizer": sum(t.nbytes for t in tensors),
        }

    def memory(self) -> dict[str, int | None]:
        """What the allocator holds after each phase of one untimed step, and each phase's peak; bytes above the start.

        `static` is held between steps with gradients in place; `workspace` is cuBLAS's, and is inside the others.
        """
        names = ("init", "forward", "backward", "optimizer")
        if self.device.type != "cuda":
            keys = [f"memory.after_{n}" for n in names] + [f"memory.peak_{n}" for n in names[1:]]
            keys += ["memory.peak", "memory.peak_first_step", "memory.static", "memory.workspace", "memory.reserved"]
            return dict.fromkeys(keys)
        self.prepare()
        found: dict[str, int | None] = {"memory.after_init": self.after_init - self.start}
        held = allocated(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        found["memory.workspace"] = held - allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

        def mark(name: str) -> None:
            found[f"memory.after_{name}"] = allocated(self.device) - self.start
            found[f"memory.peak_{name}"] = torch.cuda.max_memory_allocated(self.device) - self.start
            torch.cuda.reset_peak_memory_stats(self.device)

        self.step(mark)
        torch._C._cuda_clearCublasWorkspaces()
        found["memory.static"] = allocated(self.device) - self.start
        found["memory.peak"] = max(value for key, value in found.items() if key.startswith("memory.peak_") and value)
        found["memory.peak_first_step"] = self.first_peak
        found["memory.reserved"] = torch.cuda.memory_reserved(self.device)
        return found


def count_flops(subject: Subject, parameters: Parameters) -> dict[str, int]:
    """FLOPs of the model's own operations as torch.utils.flop_counter sees them pass in one untimed step.

    The counter cannot look into compiled code: a compiled model is counted on an eager twin without data. Nor can it
    look into kernels: with them there is no count.
    """
    if any(parameters[name] != "reference" for name in ("attention", "kernels")):
        return {}
    model, ids = subject.model, subject.ids
    if parameters["compile"] != "no":
        with torch.device("meta"):
            model, ids = TransformerLM(config_of(parameters)), ids.to("meta")
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        with torch.set_grad_enabled(subject.records), subject.autocast:
            loss = model(ids, ids)
        forward = counter.get_total_flops()
        if parameters["mode"] == "forward":
            return {"flops.forward": forward}
        loss.backward()
    return {"flops.forward": forward, "flops.backward": counter.get_total_flops() - forward}


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=group,
    columns={
        "forward, ms": "time.forward",
        "backward, ms": "time.backward",
        "optimizer, ms": "time.optimizer",
        "step, ms": "time.step",
        "first step, ms": "time.first_step",
        "after forward, GiB": "memory.after_forward",
        "peak, GiB": "memory.peak",
        "tokens/s": "tokens_per_second",
    },
    hidden=SHAPE,
    plot_x="context_length",
    plot_y="time.step",
    check=lambda measured, options: check_steps(measured, options.hardware),
    seconds_per_cell=60.0,
)
