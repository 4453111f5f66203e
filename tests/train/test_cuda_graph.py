"""Recorded steps with torch's graphs played by hand on the CPU; test_train_gpu.py has the real ones."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import Recorder, read_metrics, tiny_config, write_tokens

from groundup.train import loop, train
from groundup.train.cuda_graph import StepGraph

SHAPE = (4, 8)


class Graph:
    """What a recording does is done at each replay, on the tensors of the recording; a first one writes gradients."""

    def __init__(self):
        self.work, self.writes = None, False


class Played:
    """A linear model, its gradients, and the fakes of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.weights = [torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(i))) for i in (1, 2)]
        self.current: Graph | None = None
        self.fails = False
        self.recordings = 0
        Graph.replay = lambda graph: self.replay(graph)
        stream = SimpleNamespace(wait_stream=lambda _: None)
        monkeypatch.setattr("groundup.train.cuda_graph.side_stream", lambda _: stream)
        for name, fake in {
            "current_stream": lambda _: stream, "set_stream": lambda _: None, "stream": lambda _: nullcontext(),
            "graph_pool_handle": lambda: None, "CUDAGraph": Graph, "graph": self.recording,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    def gradients(self, inputs, targets, n_valid):
        def work():
            loss = (((inputs * self.weights[0] + self.weights[1]) - targets) ** 2).sum() / n_valid
            loss.backward()
            return loss.detach()

        if self.current is None:
            return work()
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        self.current.work, self.current.loss = work, torch.zeros(())
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.full_like(weight, float("nan"))  # not computed before the first replay
        return self.current.loss

    @contextmanager
    def recording(self, graph: Graph, **_) -> Iterator[None]:
        graph.writes = self.weights[0].grad is None
        self.current, self.recordings = graph, self.recordings + 1
        try:
            yield
        finally:
            self.current = None

    def replay(self, graph: Graph) -> None:
        for weight in self.weights if graph.writes else []:
            weight.grad.zero_()
        graph.loss.copy_(graph.work())


def batches(step: int, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(SHAPE, generator=generator) for _ in range(2)) for _ in range(count)]


def steps(played: Played, graph: StepGraph | None, first: int, count: int) -> list[torch.Tensor]:
    """Losses and gradients of some steps of three micro-batches; the weights stay."""
    found = []
    for step in range(first, first + count):
        for index, (inputs, targets) in enumerate(batches(step)):
            if graph is None:
                found.append(played.gradients(inputs, targets, 96 + step))
            else:
                found.append(graph(played.gradients, inputs, targets, 96 + step, first=index == 0).clone())
        found += [weight.grad.clone() for weight in played.weights]
        for weight in played.weights:
            weight.grad = None
    return found


def test_replays_write_and_add_as_plain_micro_batches_do(monkeypatch: pytest.MonkeyPatch):
    played = Played(monkeypatch)
    plain = steps(played, None, 0, 5)
    graph = StepGraph(played.weights)
    recorded = steps(played, graph, 0, 3)
    assert played.recordings == 2
    assert graph.release()  # as an evaluation without memory does between two steps
    assert not graph.release()
    recorded += steps(played, graph, 3, 2)
    assert played.recordings == 4
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"micro-batch of \(1, 8\) does not fit the recorded \(4, 8\)"):
        graph(played.gradients, torch.ones(1, 8), torch.ones(1, 8), 1, first=True)


@pytest.mark.parametrize("at", [1, 2])
def test_without_memory_to_record_in_steps_run_as_they_are(at: int, monkeypatch: pytest.MonkeyPatch):
    """The recording of the first micro-batch fails, or that of the second, beside gradients that are there."""
    played = Played(monkeypatch)
    plain = steps(played, None, 0, 2)
    graph, record = StepGraph(played.weights), StepGraph._record

    def recording(self, gradients, first):
        played.fails = played.recordings + 1 == at
        record(self, gradients, first)

    monkeypatch.setattr(StepGraph, "_record", recording)
    found = steps(played, graph, 0, 2)
    assert graph.given_up
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_another_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    played = Played(monkeypatch)

    def broken(inputs, targets, n_valid):
        if played.current is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return played.gradients(inputs, targets, n_valid)

    with pytest.raises(RuntimeError, match="not permitted"):
        StepGraph(played.weights)(broken, *batches(0)[0], 1, first=True)


def test_an_evaluation_without_memory_takes_that_of_a_recorded_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokens").mkdir()
    config = tiny_config(write_tokens(tmp_path / "tokens"))
    evaluate, built, asked = loop.evaluate, loop.build, []

    class Holding:
        """A recorded step that has memory until it is asked for it."""

        recorded = True
        held = True

        def __call__(self, gradients, inputs, targets, n_valid, first):
            self.held = True
            return gradients(inputs, targets, n_valid)

        def release(self) -> bool:
            asked.append(self.held)
            held, self.held = self.held, False
            return held

    graph = Holding()

    def short(*args, **kwargs):
        if graph.held:
            raise torch.OutOfMemoryError("no memory")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(loop, "evaluate", short)
    monkeypatch.setattr(loop, "build", lambda config: replace(built(config), graph=graph))
    recorder = Recorder()
    train(config, tmp_path / "run", progress=recorder)
    assert asked
    assert all(asked)
    assert sum("valid_loss" in row for row in read_metrics(tmp_path / "run")) == len(asked)
