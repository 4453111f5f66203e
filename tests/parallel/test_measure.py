"""What the benchmarks of many processes read from a trace."""

import pytest

from groundup.bench.parallel import measured_shares, merged, split_trace


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
