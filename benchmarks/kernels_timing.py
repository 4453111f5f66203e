"""What the sections of kernels_h200.py share: rows, cases that may fail, the stopwatch for kernels, errors."""

import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gpu_jobs import append, read

TINY = os.environ.get("KERNELS_TINY") == "1"
"""Try the script: small shapes on the CPU, Triton's interpreter."""
DEVICE = "cpu" if TINY else "cuda"
CASE_SECONDS = 400 if TINY else 90
"""A case that takes longer hangs; it is compiled in this time, too."""


class Section:
    """The section of this process: its name, which part of its cases it has, where its rows go."""

    name, part, parts, call = "", 0, 1, 0.0
    path: Path | None = None
    over: ClassVar[set[str]] = set()
    """Cases that are not to be tried: done, or begun before in this call and not come to an end."""


def enter(name: str, part: int, parts: int, path: Path, call: float) -> None:
    """`call`: the start of the call that all rows are of."""
    Section.name, Section.part, Section.parts, Section.path, Section.call = name, part, parts, path, call
    mine = [row for row in read(path) if row.get("section") == name]
    over = {row["done"] for row in mine if "done" in row}
    begun = {row["begun"] for row in mine if "begun" in row and row["call"] == call and row["part"] == part}
    told = {row["case"] for row in mine if "FAILED" in row and row["call"] == call}
    for case in begun - over - told:
        note(case=case, FAILED="its process ended (an error that spoils the GPU's context, or over time)")
    Section.over = over | begun


def write(**row: Any) -> None:
    if Section.path is not None:
        append(Section.path, section=Section.name, call=Section.call, part=Section.part, **row)


def note(**row: Any) -> None:
    """Keep a row and show it."""
    write(**row)
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def failed(case: str, error: Exception) -> None:
    """The row of a failure. After an error of the GPU itself nothing works in this process, so another goes on."""
    import torch

    text = str(error).replace("\n", " ")
    note(case=case, FAILED=f"{type(error).__name__}: {text[:300]}")
    traceback.print_exc()
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "[CUDA]" in text:
        os._exit(3)
    if not TINY:
        torch.cuda.empty_cache()


def attempt(name: str, function: Callable[..., None], *arguments: Any) -> None:
    """Run one case; its failure is a row, not the end. `name` is the only one of its section."""
    if name in Section.over:
        return
    write(begun=name, at=time.time())
    signal.alarm(CASE_SECONDS)  # ends the process: a kernel that hangs cannot be interrupted otherwise
    try:
        function(*arguments)
        signal.alarm(0)
        write(done=name, at=time.time())
    except Exception as error:
        signal.alarm(0)
        failed(name, error)


def of_size(n: int, tiny: int) -> int:
    """n, or `tiny` where the script is only tried."""
    return tiny if TINY else n


@contextmanager
def poisoned() -> Generator[None]:
    """Inside, torch.empty is full of NaN: what a kernel should have written and did not shows."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def median_ms(function, reps: int = 40) -> float:
    import triton

    if TINY:
        return queued_ms(function, 1, 1)
    return triton.testing.do_bench(function, warmup=10, rep=reps, return_mode="median")


def queued_ms(call, calls: int = 10, rounds: int = 5) -> float:
    """Milliseconds a call with the launches hidden: they queue up behind a kernel that waits, then run back to back.

    For what cannot be captured in a graph (cuDNN's attention keeps a random state). Inputs must exceed the L2 cache.
    """
    import torch

    if TINY:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # cycles, 20 ms or more
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def graph_ms(calls: list) -> float:
    """Milliseconds a call: all `calls` (each on buffers of its own) captured in one CUDA graph and replayed.

    A backward pass runs on the stream of its forward pass: what it walks must come from `beside`.
    """
    import torch

    from groundup.bench.harness import GRAPH_METHOD, time_kernel

    timing = time_kernel(lambda i: calls[i](), len(calls), warmup=2, steps=7, device=torch.device(DEVICE, 0))
    if timing.method != GRAPH_METHOD and not TINY:
        raise RuntimeError(f"not captured: {timing.method}")
    return statistics.median(timing.phases["total"])


def beside(work):
    """`work()` on the stream that graphs are captured on."""
    import torch

    from groundup.bench.harness import on_side_stream

    return on_side_stream(work, torch.device(DEVICE, 0))


def errors(ours, truth) -> tuple[float, float, float]:
    """(largest, mean, relative Frobenius) difference."""
    d = ours.double() - truth
    return d.abs().max().item(), d.abs().mean().item(), (d.norm() / truth.norm().clamp(min=1e-30)).item()


def race(name, functions, leaves_of, d_out_of, forward_bytes, backward_bytes) -> None:
    """Forward and backward of each function on three sets of inputs, by graph replay."""
    import torch

    sets = [leaves_of() for _ in range(3)]

    def backward(leaves: list, out: Any, flow: Any) -> None:
        torch.autograd.grad(out, [x for x in leaves if x.requires_grad], flow, retain_graph=True)

    def backward_calls(function: Callable) -> list:
        outs = beside(lambda: [function(*s) for s in sets])
        return [partial(backward, s, o, d_out_of(o)) for s, o in zip(sets, outs, strict=True)]

    for what, function in functions.items():
        row = {}
        try:
            with torch.no_grad():
                row["fwd_gbs"] = forward_bytes / graph_ms([partial(function, *s) for s in sets]) / 1e6
            row["bwd_gbs"] = backward_bytes / graph_ms(backward_calls(function)) / 1e6
        except Exception as error:
            failed(f"{name} {what}", error)
        finally:
            if row:
                note(case=name, what=what, **row)
