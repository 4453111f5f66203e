"""What the sections of kernels_h200.py share: rows, the stopwatch for kernels, errors against a truth."""

import json
import statistics
import sys
import traceback
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))


class Section:
    """The section of this process: which part of its cases, where its rows go."""

    part, parts = 0, 1
    path: Path | None = None
    rows: ClassVar[list[dict]] = []


def note(**row) -> None:
    """Keep a row and show it; the file is written each time, so that a section that is stopped keeps what it has."""
    Section.rows.append(row)
    if Section.path is not None:
        Section.path.write_text(json.dumps(Section.rows, indent=1))
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def attempt(name: str, function, *arguments) -> None:
    """Run one case; its failure is a row, not the end."""
    try:
        function(*arguments)
    except Exception as error:
        text = str(error).replace("\n", " ")
        note(case=name, FAILED=f"{type(error).__name__}: {text[:300]}")
        traceback.print_exc()


def median_ms(function, reps: int = 40) -> float:
    import triton

    return triton.testing.do_bench(function, warmup=10, rep=reps, return_mode="median")


def queued_ms(call, calls: int = 10, rounds: int = 5) -> float:
    """Milliseconds a call with the launches hidden: they queue up behind a kernel that waits, then run back to back.

    For what cannot be captured in a graph (cuDNN's attention keeps a random state). Inputs must exceed the L2 cache.
    """
    import torch

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

    timing = time_kernel(lambda i: calls[i](), len(calls), warmup=2, steps=7, device=torch.device("cuda", 0))
    if timing.method != GRAPH_METHOD:
        raise RuntimeError(f"not captured: {timing.method}")
    return statistics.median(timing.phases["total"])


def beside(work):
    """`work()` on the stream that graphs are captured on."""
    import torch

    from groundup.bench.harness import on_side_stream

    return on_side_stream(work, torch.device("cuda", 0))


def errors(ours, truth) -> tuple[float, float, float]:
    """(largest, mean, relative Frobenius) difference."""
    d = ours.double() - truth
    return d.abs().max().item(), d.abs().mean().item(), (d.norm() / truth.norm().clamp(min=1e-30)).item()


def race(name, functions, leaves_of, d_out_of, forward_bytes, backward_bytes) -> None:
    """Forward and backward of each function on three sets of inputs, by graph replay."""
    import torch

    sets = [leaves_of() for _ in range(3)]
    for what, function in functions.items():
        with torch.no_grad():
            forward = graph_ms([lambda s=s, f=function: f(*s) for s in sets])
        outs = beside(lambda f=function: [f(*s) for s in sets])
        flows = [d_out_of(o) for o in outs]
        backward = graph_ms(
            [
                lambda o=o, s=s, g=g: torch.autograd.grad(o, [x for x in s if x.requires_grad], g, retain_graph=True)
                for o, s, g in zip(outs, sets, flows, strict=True)
            ]
        )
        note(case=name, what=what, fwd_gbs=forward_bytes / forward / 1e6, bwd_gbs=backward_bytes / backward / 1e6)
