"""The stopwatch, against a clock whose ticks are known and against numpy."""

from itertools import count

import numpy as np
import pytest
import torch

from groundup.bench import harness
from groundup.bench.harness import buffer_sets, summary, time_arrivals, time_kernel, time_steps

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves a second each time it is read."""
    ticks = count()
    monkeypatch.setattr(harness, "perf_counter", lambda: float(next(ticks)))


def test_summary_is_what_numpy_says():
    samples = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.3]
    found = summary(samples)
    assert found["mean"] == pytest.approx(np.mean(samples))
    assert found["std"] == pytest.approx(np.std(samples, ddof=1))
    assert found["median"] == np.median(samples)
    assert (found["p10"], found["p90"]) == pytest.approx(tuple(np.percentile(samples, [10, 90])))
    assert (found["min"], found["max"], found["n"]) == (1.0, 9.0, 7)


def test_summary_of_one_sample_has_no_spread():
    assert summary([2.0])["std"] == 0.0
    assert summary([2.0])["p90"] == 2.0


def test_phases_and_total_by_the_clock(ticking):
    def step(mark):
        mark("forward")
        harness.perf_counter()  # a second of work more
        mark("backward")

    timing = time_steps(step, warmup=2, steps=3, device=CPU)
    assert timing.phases == {"forward": [1000.0] * 3, "backward": [2000.0] * 3, "total": [3000.0] * 3}


def test_warmup_is_left_out_but_the_first_step_is_kept(ticking):
    calls = []

    def step(mark):
        calls.append("step")
        if len(calls) == 2:  # prepare came before
            harness.perf_counter()
            harness.perf_counter()
        mark("only")

    timing = time_steps(step, warmup=1, steps=2, device=CPU, prepare=lambda: calls.append("prepare"))
    assert calls == ["prepare", "step"] * 3
    assert timing.first["total"] == 3000.0
    assert timing.phases["total"] == [1000.0, 1000.0]


def test_without_warmup_the_first_step_is_timed(ticking):
    seen = []

    def step(mark):
        seen.append(0)
        for _ in range(3 if len(seen) == 1 else 0):
            harness.perf_counter()
        mark("only")

    assert time_steps(step, 0, 2, CPU).phases["total"] == [4000.0, 1000.0]


def test_arrivals_are_timed_one_to_the_next(ticking, monkeypatch):
    """Nobody waits for the device between them."""
    waits, calls = [], []
    monkeypatch.setattr(harness, "synchronize", lambda device: waits.append(len(calls)))

    def step():
        calls.append("step")
        for _ in range({1: 5, 3: 2}.get(len(calls), 0)):
            harness.perf_counter()

    timing = time_arrivals(step, warmup=2, steps=2, device=CPU)
    assert timing.phases == {"total": [3000.0, 1000.0]}
    assert timing.first == {"total": 6000.0}
    assert timing.stamp["method"] == harness.ARRIVAL_METHOD
    assert waits == [0]


def test_kernels_rotate_over_their_inputs(ticking):
    seen = []
    timing = time_kernel(seen.append, sets=3, warmup=1, steps=6, device=CPU)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert timing.phases["total"] == [1000.0] * 6


def test_buffers_exceed_the_cache(monkeypatch):
    class Properties:
        L2_cache_size = 60_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    for size in (1, 1_000_000, 59_000_000, 500_000_000):
        sets = buffer_sets(size, cuda)
        assert sets == 64 or sets * size >= 3 * Properties.L2_cache_size
        assert sets >= 2


@pytest.mark.gpu
def test_graph_replay_times_kernels_and_their_backward():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, requires_grad=True)
    outputs = harness.on_side_stream(lambda: [x.sin(), x.cos()], device)
    timing = time_kernel(
        lambda i: torch.autograd.grad(outputs[i], x, torch.ones_like(outputs[i]), retain_graph=True), 2, 1, 5, device
    )
    assert timing.method == harness.GRAPH_METHOD
    # 64 MiB and more move: less than 10 µs would be a graph that captured nothing.
    assert min(timing.phases["total"]) > 0.01
