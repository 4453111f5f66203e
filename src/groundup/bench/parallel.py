"""Measuring many processes: a collective, and a training step under an engine. Runs on every rank of a group.

Steps are timed back to back, an event after each, and the device waited for at the end only: what a step leaves to its
successor (ZeRO-1's gathering of parameters) is then inside the times, and the host runs ahead as in training. Python's
collector of cycles is off meanwhile: it strikes each rank at another step, and one late rank makes all wait.

Exposed communication is read from a profiler's trace: the time in which a communication kernel runs and no other does.
A subtraction of two step times would hide that overlapped communication slows the computation beside it. The time in
which nothing runs at all is what the host was too slow for: with much of it a step measures Python, not the engine.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.bench.benchmark import numbers
from groundup.bench.cells import Parameters, file_name
from groundup.bench.harness import allocated, milliseconds, now, summary, synchronize
from groundup.config import ModelConfig, ParallelConfig
from groundup.model import TransformerLM, count_parameters
from groundup.optim import parameter_groups
from groundup.parallel.engine import parallelize
from groundup.parallel.launch import spawn
from groundup.parallel.processes import connect, local_device, this_world
from groundup.parallel.state import local_bytes
from groundup.parallel.zero import ShardedOptimizer

Metrics = dict[str, Any]
Spans = list[tuple[float, float]]

ENGINES = ("none", "naive", "flat", "overlap", "bucketed", "zero1", "fsdp", "torch-ddp", "torch-fsdp2")
"""none: every rank trains for itself."""


def measure_all_reduce(
    n_bytes: int, device: torch.device, dtype: torch.dtype, warmup: int, steps: int, seed: int = 0, group: Any = None
) -> Metrics:
    """Milliseconds and GB/s of an all-reduce of `n_bytes`, the slowest rank's; bandwidth as nccl-tests define it.

    Bus bandwidth is 2·(W-1)/W · bytes / seconds: what a link carries, comparable between world sizes.
    """
    generator, world = torch.Generator(device).manual_seed(seed + dist.get_rank()), dist.get_world_size()
    values = torch.rand(max(1, n_bytes // dtype.itemsize), dtype=dtype, device=device, generator=generator)
    samples = []
    for index in range(warmup + steps):
        dist.barrier(group)
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        synchronize(device)
        if index >= warmup:
            samples.append((time.perf_counter() - start) * 1e3)
        values /= world
    slowest = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    times = summary(slowest.tolist())
    rate = values.nbytes / times["median"] / 1e6
    return {"time.all_reduce": times, "bandwidth.algorithm": rate, "bandwidth.bus": rate * 2 * (world - 1) / world}


@dataclass(frozen=True)
class Setting:
    """One measured training step."""

    model: ModelConfig
    engine: str = "bucketed"
    bucket_mb: float = 50.0
    batch_size: int = 4
    """Sequences a rank."""
    precision: str = "bf16"
    """bf16: autocast, FSDP gathers bf16; fp32."""
    reduce: str = "auto"
    compile: bool = False
    """Compile each block, and the head with the loss."""
    warmup: int = 3
    steps: int = 10
    seed: int = 0
    """Seeds the weights; the tokens, with the rank."""
    trace: bool = True
    """Read the exposed communication from a trace of two steps."""


class Subject:
    """A model under an engine with its optimizer and one batch."""

    def __init__(self, setting: Setting, device: torch.device):
        self.setting, self.device = setting, device
        synchronize(device)
        self.start = allocated(device)
        torch.manual_seed(setting.seed)
        with torch.device(device):
            self.model = TransformerLM(setting.model)
            shape = setting.batch_size, setting.model.context_length
            generator = torch.Generator(device).manual_seed(1 + setting.seed + dist.get_rank())
            self.ids = torch.randint(self.model.config.vocab_size, shape, generator=generator)
            self.targets = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        self.parameters = count_parameters(self.model)
        if setting.compile:
            compile_parts(self.model)
        self.engine, self.optimizer = self._make()
        synchronize(device)
        self.after_init = allocated(device) - self.start

    def _make(self) -> tuple[Any, Any]:
        setting, fused = self.setting, self.device.type == "cuda"

        def adamw(model: nn.Module) -> torch.optim.Optimizer:
            groups = parameter_groups(model, 0.1)
            return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=fused)

        if setting.engine == "none":
            return self.model, adamw(self.model)
        data, optimizer = ("bucketed", "zero1") if setting.engine == "zero1" else (setting.engine, "whole")
        parallel = ParallelConfig(data, optimizer, setting.bucket_mb, setting.reduce)  # type: ignore[arg-type]
        dtype = torch.bfloat16 if setting.precision == "bf16" else None
        # Averaging, as torch's engines do without a hook of ours.
        return parallelize(self.model, parallel, adamw, dtype, average=True)

    def forward_backward(self) -> Tensor:
        bf16 = self.setting.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            loss = self.engine(self.ids, self.targets, n_valid=float(self.ids.numel()))
        loss.backward()
        if self.setting.engine != "none":
            self.engine.finish_gradient_synchronization()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def compile_parts(model: TransformerLM) -> None:
    """Compile what lies between an engine's hooks: each block, and the head with the loss."""
    for block in model.layers:
        block.forward = torch.compile(block.forward)
    if model.lm_head is not None:
        model.lm_head.forward = torch.compile(model.lm_head.forward)
    else:
        model.head = torch.compile(model.head)


def measure_step(setting: Setting, device: torch.device) -> Metrics:
    """Times, memory and the trace's shares of one setting; a collective. Bytes are this rank's."""
    subject = Subject(setting, device)
    first_start = time.perf_counter()
    losses = [subject.step() for _ in range(setting.warmup)]
    synchronize(device)
    first = time.perf_counter() - first_start
    with uncollected():
        samples = time_back_to_back(subject.step, setting.steps, device)
    metrics: dict[str, Any] = {"time.step": summary(samples), "time.warmup": first * 1e3, "loss": losses[-1].item()}
    tokens = setting.batch_size * setting.model.context_length * dist.get_world_size()
    metrics["tokens_per_second"] = tokens / metrics["time.step"]["median"] * 1e3
    metrics |= memory(subject)
    if setting.trace:
        metrics |= shares(subject.step, device)
    metrics["parameters.total"] = subject.parameters
    return metrics


@contextmanager
def uncollected() -> Generator[None]:
    """Python's collector of cycles has run before, and does not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_back_to_back(step: Callable[[], Any], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `steps` steps that follow each other without a wait."""
    dist.barrier()
    synchronize(device)
    marks = [now(device)]
    for _ in range(steps):
        step()
        marks.append(now(device))
    synchronize(device)
    return [milliseconds(a, b) for a, b in pairwise(marks)]


def memory(subject: Subject) -> dict[str, Any]:
    """Bytes of the tensors by what they are, and what the allocator says after init, before and after a step."""
    device, on_cuda = subject.device, subject.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    subject.forward_backward()
    synchronize(device)
    before = allocated(device) - subject.start
    optimizer, lines = subject.optimizer, []
    if isinstance(optimizer, ShardedOptimizer):
        lines, inner = optimizer.lines, optimizer.inner
    else:
        inner = optimizer
    params = list(subject.model.parameters())
    gradients = [line.gradient for line in lines] + [p.grad for p in params]
    subject.optimizer.step()
    state = [value for entry in inner.state.values() for value in entry.values() if isinstance(value, Tensor)]
    found: dict[str, Any] = {
        "memory.parameters": sum(line.buffer.nbytes for line in lines) or held(params),
        "memory.gradients": held(g for g in gradients if g is not None),
        "memory.state": held(state),
    }
    if lines:
        inside = {p for line in lines for p in line.params}
        found["memory.parameters"] += held(p for p in params if p not in inside)
    del gradients, state
    subject.optimizer.zero_grad()
    synchronize(device)
    names = ("after_init", "before_step", "after_step", "peak", "activations")
    if not on_cuda:
        return found | {f"memory.{name}": None for name in names}
    peak = torch.cuda.max_memory_allocated(device) - subject.start
    tensors = found["memory.parameters"] + found["memory.gradients"] + found["memory.state"]
    values = (subject.after_init, before, allocated(device) - subject.start, peak, max(0, peak - tensors))
    return found | {f"memory.{name}": value for name, value in zip(names, values, strict=True)}


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank holds of them."""
    return sum(map(local_bytes, tensors))


HOST_BOUND = 0.1
"""A step is bound by its host when nothing runs in more than this share of its time."""


def shares(step: Callable[[], Any], device: torch.device, steps: int = 2) -> dict[str, Any]:
    """From a trace of `steps` steps, milliseconds a step: communication, and that beside which nothing else runs; the
    computation; and the time in which nothing runs, the device waiting for the host.
    """
    # Not both on a GPU: recording the host's operations slows the host.
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    dist.barrier()
    synchronize(device)
    with uncollected(), torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    communication, other = split_trace(events, device.type == "cuda")
    return measured_shares(communication, other, steps)


def measured_shares(communication: Spans, other: Spans, steps: int) -> dict[str, Any]:
    """What two lists of disjoint spans in µs say of `steps` steps."""
    busy = merged([*communication, *other])
    total, exposed = length(communication), length(busy) - length(other)
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    idle = span - length(busy)
    return {
        "time.communication": total / steps / 1e3,
        "time.exposed": exposed / steps / 1e3,
        "time.computation": length(other) / steps / 1e3,
        "time.idle": idle / steps / 1e3,
        "exposed_share": exposed / span if span else 0.0,
        "hidden_share": 1 - exposed / total if total else None,
        "bound_by": "host" if span and idle / span > HOST_BOUND else "device",
    }


def split_trace(events: list[dict[str, Any]], on_cuda: bool) -> tuple[Spans, Spans]:
    """(communication, everything else) of a trace as disjoint spans in µs: kernels on a GPU, operations on a CPU."""
    communication, other = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat", ""), str(event.get("name", ""))
        if kind not in (("kernel", "gpu_memcpy", "gpu_memset") if on_cuda else ("cpu_op", "user_annotation")):
            continue
        is_communication = "nccl" in name.lower() if on_cuda else name.startswith("gloo:")
        if not on_cuda and not is_communication and not name.startswith("aten::"):
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        (communication if is_communication else other).append(span)
    return merged(communication), merged(other)


def merged(spans: Spans) -> Spans:
    """The union of spans, as disjoint ones in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def at_context(model: ModelConfig, context_length: int) -> ModelConfig:
    """A shape as the steps are measured: PyTorch's attention, plain operations for the compiler, a chunked loss."""
    return replace(model, context_length=context_length, attention="sdpa", kernels="loss").resolve()


def in_ranks(parameters: Parameters, work: Callable[..., Metrics]) -> Metrics:
    """`work(device=…)` on as many ranks of this machine as the cell says; rank 0's result.

    In a world that a launcher started, in that one.
    """
    if this_world().size > 1:
        return _rank(parameters, work)
    return spawn(_rank, parameters["processes"], parameters, work)[0]


def _rank(parameters: Parameters, work: Callable[..., Metrics]) -> Metrics:
    """Cells of one process share its connection. After a failed cell the ranks' new processes meet under a new name."""
    world = this_world()
    device = local_device(parameters["device"], world)
    if not dist.is_initialized():
        connect(world, device, name=file_name("", parameters))
    return work(device=device)


def ranks_of(text: str, device: str, last: bool = False) -> list[int]:
    """Numbers of processes: those of the option, or 2, 4, 6, 8 as far as there are GPUs (`last`: the most only)."""
    world = this_world()
    if world.size > 1:
        return [world.size]
    if text:
        return numbers(text, "--processes", least=2)
    count = torch.cuda.device_count() if device == "cuda" else 2
    found = [n for n in (2, 4, 6, 8) if n <= count] or [1]
    return found[-1:] if last else found
