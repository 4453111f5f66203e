"""Rows of steps: their times by a clock under control, on the CPU and in a GPU's queue."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groundup.train.metrics import StepRows


class Queue:
    """A GPU's queue as seen from the host: events take the queue's time, and say it once they were waited for."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        queue = self

        class Event:
            def __init__(self, enable_timing: bool = False):
                self.timed, self.reached = enable_timing, False

            def record(self) -> None:
                self.at = queue.milliseconds

            def synchronize(self) -> None:
                self.reached = True

            def elapsed_time(self, end: "Event") -> float:
                assert self.timed
                assert end.timed
                assert end.reached
                return end.at - self.at

        self.event = Event


def put(rows: StepRows, step: int) -> None:
    rows.put(
        step,
        lr=0.1 * step,
        loss=torch.tensor(10.0 - step),
        grad_norm=torch.tensor(float(step)),
        skipped=torch.tensor(False),
    )


def test_a_row_is_written_at_once_and_tells_the_time_of_its_step(monkeypatch: pytest.MonkeyPatch):
    clock, written = SimpleNamespace(now=5.0), []
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    rows = StepRows(written.append, tokens_per_step=60, device=torch.device("cpu"))
    clock.now += 2
    put(rows, 1)
    assert written[0].pop("memory_gib") > 0
    assert written == [
        {"step": 1, "loss": 9.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 60, "tokens_per_second": 30.0},
    ]
    clock.now += 3
    put(rows, 2)
    clock.now += 100  # a save
    rows.restart_clock()
    clock.now += 6
    put(rows, 3)
    assert [row["tokens_per_second"] for row in written] == [30.0, 20.0, 10.0]
    assert written[-1]["tokens"] == 180


def test_on_a_gpu_a_row_is_written_one_step_late_with_the_time_in_the_queue(monkeypatch: pytest.MonkeyPatch):
    queue, written = Queue(), []
    monkeypatch.setattr("torch.cuda.Event", queue.event)
    rows = StepRows(written.append, tokens_per_step=60, device=torch.device("cuda"))

    def steps() -> list[Any]:
        return [(row["step"], row["loss"], row["tokens_per_second"]) for row in written]

    queue.milliseconds += 2000
    put(rows, 1)
    assert steps() == []
    queue.milliseconds += 3000
    put(rows, 2)
    assert steps() == [(1, 9.0, 30.0)]
    rows.flush()
    rows.flush()
    assert steps() == [(1, 9.0, 30.0), (2, 8.0, 20.0)]
    queue.milliseconds += 100_000  # a save
    rows.restart_clock()
    queue.milliseconds += 6000
    put(rows, 3)
    rows.flush()
    assert steps()[-1] == (3, 7.0, 10.0)
