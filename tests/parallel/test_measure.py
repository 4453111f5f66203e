"""What the benchmarks of many processes read from a trace, and the memory that they count, against the formula."""

import pytest

from groundup.bench.parallel import (
    Setting,
    at_context,
    in_ranks,
    measure_setting,
    measured_shares,
    merged,
    overlap,
    split_trace,
)
from groundup.config import size
from groundup.model import TransformerLM, count_parameters


def event(name: str, start: float, end: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start}


def test_exposed_communication_is_what_no_kernel_hides():
    events = [
        event("ncclDevKernel_AllReduce", 10, 30),
        event("ncclDevKernel_AllGather", 25, 40),
        event("gemm", 0, 20),
        event("elementwise", 18, 22),
        event("gemm", 35, 36),
        event("cudaLaunchKernel", 0, 100, "cuda_runtime"),
        {"ph": "i", "name": "nccl", "ts": 0},
    ]
    communication, other = split_trace(events, on_cuda=True)
    assert communication == [(10, 40)]
    assert other == [(0, 22), (35, 36)]
    assert overlap(communication, other) == 13
    assert measured_shares(communication, other, steps=1) == {
        "time.communication": pytest.approx(0.030),
        "time.exposed": pytest.approx(0.017),
        "time.computation": pytest.approx(0.023),
        "time.idle": 0.0,
        "exposed_share": pytest.approx(17 / 40),
        "hidden_share": pytest.approx(13 / 30),
        "bound_by": "device",
    }


def test_a_step_whose_device_waits_for_the_host_is_bound_by_it():
    found = measured_shares([(0, 10), (70, 80)], [(5, 50), (90, 100)], steps=2)
    assert (found["time.idle"], found["bound_by"]) == (pytest.approx(0.015), "host")
    assert measured_shares([], [], steps=2)["bound_by"] == "device"


def test_spans():
    assert merged([(3, 4), (0, 2), (1, 3), (9, 9)]) == [(0, 4), (9, 9)]
    assert overlap([(0, 10)], [(1, 2), (4, 12)]) == 7
    assert overlap([], [(0, 1)]) == 0


@pytest.mark.parametrize(
    ("engine", "parameters", "gradients", "state"),
    [("zero1", 4, 2, 4), pytest.param("fsdp", 2, 2, 4, marks=pytest.mark.slow)],
)
def test_memory_is_within_a_percent_of_the_formula(engine, parameters, gradients, state):
    """Bytes a parameter on one of two ranks, float32 and Adam."""
    shape = at_context(size("tiny"), 8)
    setting = Setting(shape, engine, batch_size=1, precision="fp32", warmup=1, steps=1)
    found = in_ranks(2, "cpu", measure_setting, setting)
    total = count_parameters(TransformerLM(shape))
    assert found["memory.parameters"] == pytest.approx(parameters * total, rel=0.01)
    assert found["memory.gradients"] == pytest.approx(gradients * total, rel=0.01)
    assert found["memory.state"] == pytest.approx(state * total, rel=0.01)
