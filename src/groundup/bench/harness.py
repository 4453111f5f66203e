"""The one stopwatch of all benchmarks: warm-up, steps, device synchronisation, statistics. A cell names its method.

`time_steps`: whole steps, their phases parted by CUDA events; the device is synchronised after each, so that a step
starts with an empty queue. Where the GPU is faster than Python can launch, that shows. Rejected: host clocks around
asynchronous calls, which time the launch, or with a wait serialise what overlaps.

`time_arrivals`: steps that each end with a result on the host, by the host's clock from one result to the next. What
runs ahead on the device is left running, since whoever wants the results does not wait for it.

`time_kernel`: kernels of microseconds, captured in a CUDA graph (no launch gaps) and rotating over sets of inputs that
together exceed the L2 cache, so no call finds its inputs there. On the CPU both read perf_counter.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from math import ceil
from time import perf_counter
from typing import Any

import torch

from groundup.bench.environment import clocks

STEP_METHOD = {"cuda": "CUDA events, device synchronised after each step", "cpu": "perf_counter"}
ARRIVAL_METHOD = "perf_counter from result to result, device not synchronised"
GRAPH_METHOD = "CUDA graph replay over rotating buffers beyond L2"
CALL_METHOD = {"cuda": "CUDA events around single calls over rotating buffers beyond L2", "cpu": "perf_counter"}


@dataclass(frozen=True)
class Timing:
    """Samples in milliseconds by phase, in the order of the steps, warm-up excluded."""

    phases: dict[str, list[float]]
    method: str
    first: dict[str, float] = field(default_factory=dict)
    """The very first step's phases, warm-up or not."""
    clocks: dict[str, Any] | None = None
    """What the GPU's clocks were while it worked on the last step."""

    @property
    def metrics(self) -> dict[str, Any]:
        """time.PHASE → summary."""
        return {f"time.{name}": summary(samples) for name, samples in self.phases.items()}

    @property
    def stamp(self) -> dict[str, Any]:
        """What a cell says of how its times came about."""
        return {"method": self.method, "clocks": self.clocks}


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    """Mean, standard deviation (n - 1; 0 for one sample), median, 10th and 90th percentile, extremes, count."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
    return {
        "mean": statistics.fmean(samples),
        "std": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "median": statistics.median(samples),
        "p10": deciles[0],
        "p90": deciles[-1],
        "min": min(samples),
        "max": max(samples),
        "n": len(samples),
    }


def time_steps(
    step: Callable[[Callable[[str], None]], None],
    warmup: int,
    steps: int,
    device: torch.device,
    prepare: Callable[[], None] | None = None,
) -> Timing:
    """Run `prepare()` (untimed) and `step(mark)` warmup + steps times; time the phases of the last `steps`.

    `step` calls mark(name) at the end of each phase. Phase "total" is the whole step.
    """
    on_cuda = device.type == "cuda"
    phases: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    stamp = clocks(device)  # opens NVML now, not during the last step
    for index in range(warmup + steps):
        if prepare is not None:
            prepare()
        marks: list[tuple[str, Any]] = []
        synchronize(device)
        start = now(device)
        step(lambda name, marks=marks: marks.append((name, now(device))))
        if on_cuda and index == warmup + steps - 1:
            stamp = clocks(device)  # the launches are queued, the GPU is still at work
        synchronize(device)
        times = _elapsed(start, marks)
        first = first or times
        if index >= warmup:
            for name, value in times.items():
                phases.setdefault(name, []).append(value)
    return Timing(phases, STEP_METHOD[device.type], first, stamp)


def time_arrivals(step: Callable[[], None], warmup: int, steps: int, device: torch.device) -> Timing:
    """Run `step()`, which waits for its result, warmup + steps times; phase "total" between the last steps + 1 results.

    The clocks are read right after the last step.
    """
    clocks(device)  # opens NVML now, not after the last step
    synchronize(device)
    times = [perf_counter()]
    for _ in range(warmup + steps):
        step()
        times.append(perf_counter())
    stamp = clocks(device)
    samples = [(after - before) * 1e3 for before, after in pairwise(times)]
    return Timing({"total": samples[warmup:]}, ARRIVAL_METHOD, {"total": samples[0]}, stamp)


def now(device: torch.device) -> Any:
    """This moment: of the device's queue, a CUDA event, where there is one."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two moments; the device has come to the second one."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def _elapsed(start: Any, marks: list[tuple[str, Any]]) -> dict[str, float]:
    times, before = {}, start
    for name, mark in marks:
        times[name] = milliseconds(before, mark)
        before = mark
    return times | {"total": milliseconds(start, before)}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of live tensors; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Forget what was held before: the allocator's peak is looked for from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_above(start: int, device: torch.device) -> int | None:
    """Bytes of the allocator's peak above `start`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) - start if device.type == "cuda" else None


def buffer_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of inputs to rotate over so that they exceed the L2 cache three times (two at least)."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(64, max(2, ceil(3 * cache / max(1, bytes_per_set))))


def time_kernel(
    call: Callable[[int], Any], sets: int, warmup: int, steps: int, device: torch.device, calls: int = 0
) -> Timing:
    """Milliseconds of one `call(i)`, which works on set `i` of `sets` inputs; phase "total".

    `calls`: calls in one graph (0: the smallest multiple of `sets` from 20 up). A sample is one replay over them. What
    cannot be captured is timed call by call, and `method` says so. `call` runs on a side stream: tensors whose
    autograd graph it walks must be made by it or by `on_side_stream`.
    """
    if device.type == "cuda":
        calls = calls or sets * ceil(20 / sets)
        graph = _captured(call, sets, calls, device)
        if graph is not None:
            return _total(graph.replay, GRAPH_METHOD, calls, warmup, steps, device)
    places = cycle(range(sets))
    return _total(lambda: call(next(places)), CALL_METHOD[device.type], 1, warmup, steps, device)


def _total(work: Callable[[], Any], method: str, calls: int, warmup: int, steps: int, device: torch.device) -> Timing:
    """Phase "total" of one of the `calls` calls that `work()` makes."""

    def step(mark: Callable[[str], None]) -> None:
        work()
        mark("total")

    timing = time_steps(step, warmup, steps, device)
    samples = [sample / calls for sample in timing.phases["total"]]
    return Timing({"total": samples}, method, {"total": timing.first["total"] / calls}, timing.clocks)


def on_side_stream(work: Callable[[], Any], device: torch.device) -> Any:
    """`work()` on the stream that `time_kernel` captures: a backward pass runs on its forward pass's stream."""
    if device.type != "cuda":
        return work()
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = work()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _captured(call: Callable[[int], Any], sets: int, calls: int, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """`calls` calls as one graph; None where they cannot be captured."""

    def warm() -> None:
        for i in range(max(3, sets)):
            call(i % sets)

    on_side_stream(warm, device)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=_side_stream(device)):
            for i in range(calls):
                call(i % sets)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None
    return graph
