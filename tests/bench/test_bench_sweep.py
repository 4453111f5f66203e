"""Sweeps: resumed, interrupted, run out of memory, crashed, too slow."""

import json
import sys
import textwrap
from dataclasses import replace
from importlib import import_module

import pytest
from bench_tools import InProcess, in_process, validate

from groundup.bench import sweep as sweep_module
from groundup.bench.benchmark import find
from groundup.bench.cells import document, file_name, read_cell, read_results, select, write_cell
from groundup.bench.sweep import sweep
from groundup.bench.worker import measure
from groundup.cli import dispatch
from groundup.errors import UserError
from groundup.train.guards import is_out_of_memory

FAKE = '''
"""A benchmark that does what its cells say."""
import os, time
import torch
from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions

def run(parameters, device):
    match parameters["what"]:
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
        case "exit":
            print("the last words", file=__import__("sys").stderr, flush=True)
            os._exit(7)
        case "hang":
            time.sleep(600)
    print("noise on standard output")
    return Measurement({"pid": os.getpid()}, {"dtype": "float32", "grad_mode": "grad"})

BENCHMARK = Benchmark(
    module=__name__,
    options=SweepOptions,
    cells=lambda options: [
        {"what": what, "number": i, "seed": 0, "device": "cpu"}
        for i, what in enumerate(["ok", "ok", "oom", "ok", "exit", "hang", "ok"])
    ],
    run=run,
    group=lambda parameters: "one",
    columns={},
)
'''


def test_failures_are_cells_and_not_the_end(tmp_path, monkeypatch):
    (tmp_path / "fake_failures.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    benchmark = import_module("fake_failures").BENCHMARK
    options = benchmark.options(device="cpu", out=str(tmp_path / "cells"), time_limit=5.0)
    progress = []
    cells, left = sweep(benchmark, options, lambda i, n, cell: progress.append((i, n)))
    assert left == 0
    assert [cell["status"] for cell in cells] == ["ok", "ok", "oom", "ok", "error", "timeout", "ok"]
    messages = [cell["message"] for cell in cells]
    assert "1 EiB" in messages[2]
    assert messages[4] == "the process ended (exit code 7): the last words"
    assert messages[5] == "stopped after the time limit of 5 s"
    pids = [cells[i]["metrics"]["pid"] for i in (0, 1, 3, 6)]
    assert pids[0] == pids[1]  # one process for the group …
    assert len(set(pids)) == 3  # … and a fresh one after each failure
    assert progress == [(i, 7) for i in range(1, 8)]
    validate(document("fake-failures", cells))
    assert json.loads(json.dumps(cells)) == [
        read_cell(tmp_path / "cells", c["benchmark"], c["parameters"]) for c in cells
    ]


def options_for(benchmark, directory, **changes):
    return benchmark.options(device="cpu", out=str(directory), **changes)


def test_a_sweep_continues_where_it_stopped(tmp_path, monkeypatch):
    in_process(monkeypatch)
    benchmark = find("mixed-precision")
    first, _ = sweep(benchmark, options_for(benchmark, tmp_path, part="accumulation"))
    seen = []
    cells, left = sweep(benchmark, options_for(benchmark, tmp_path), lambda i, n, cell: seen.append(n))
    assert (len(cells), left) == (3, 0)
    assert seen == [2, 2]
    assert cells[0] == first[0]
    InProcess.started = 0
    sweep(benchmark, options_for(benchmark, tmp_path))
    assert InProcess.started == 0
    again, _ = sweep(benchmark, options_for(benchmark, tmp_path, fresh=True), lambda i, n, cell: seen.append(n))
    assert seen == [2, 2, 3, 3, 3]
    assert len(again) == 3


def test_a_failed_cell_is_measured_again(tmp_path, monkeypatch):
    in_process(monkeypatch)
    benchmark = find("mixed-precision")
    options = options_for(benchmark, tmp_path, part="accumulation")
    cells, _ = sweep(benchmark, options)
    write_cell(tmp_path, cells[0] | {"status": "error", "message": "once", "metrics": {}})
    assert sweep(benchmark, options)[0][0]["status"] == "ok"


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch):
    class Interrupted(InProcess):
        def measure(self, parameters, time_limit):
            if parameters["part"] == "autocast-bf16":
                raise KeyboardInterrupt
            return super().measure(parameters, time_limit)

    monkeypatch.setattr(sweep_module, "Worker", Interrupted)
    benchmark = find("mixed-precision")
    with pytest.raises(KeyboardInterrupt):
        sweep(benchmark, options_for(benchmark, tmp_path))
    assert len(read_results([tmp_path])) == 2
    assert not list(tmp_path.glob(".*"))


def test_only_rank_zero_keeps_cells(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch)
    benchmark = find("mixed-precision")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    options = options_for(benchmark, tmp_path / "cells", part="accumulation")
    cells, _ = sweep(benchmark, options, lambda *_: pytest.fail("rank 1 speaks"))
    assert (len(cells), list(tmp_path.iterdir())) == (1, [])
    argv = ["mixed-precision", "--device", "cpu", "--part", "accumulation", "--out", str(tmp_path / "cells")]
    assert dispatch(["bench", *argv, "--json", str(tmp_path / "all.json")]) == 0
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])
    monkeypatch.setenv("RANK", "0")
    sweep(benchmark, options)
    assert len(list((tmp_path / "cells").iterdir())) == 1


def test_no_cell_starts_after_the_deadline(tmp_path, monkeypatch):
    in_process(monkeypatch)
    clock = iter([0.0, 0.0, 5.0, 11.0])
    monkeypatch.setattr(sweep_module, "monotonic", lambda: next(clock))
    benchmark = find("mixed-precision")
    cells, left = sweep(benchmark, options_for(benchmark, tmp_path, deadline_seconds=10.0))
    assert (len(cells), left) == (2, 1)


def test_a_corrupt_cell_is_named(tmp_path, monkeypatch):
    in_process(monkeypatch)
    benchmark = find("mixed-precision")
    options = options_for(benchmark, tmp_path, part="accumulation")
    path = tmp_path / file_name(benchmark.name, benchmark.cells(options)[0])
    for text in ("{", "[]", '{"schema": 99}', '{"schema": 1, "cells": [3]}'):
        path.write_text(text)
        with pytest.raises(UserError, match=path.name):
            sweep(benchmark, options)


def test_names_differ_where_parameters_do():
    base = {"size": "small", "grad": True, "n": 1, "device": "cpu"}
    changes = ({}, {"grad": False}, {"n": 2}, {"size": "a/b"}, {"x": 0.5})
    names = {file_name(benchmark, base | change) for benchmark in ("ddp", "sharding") for change in changes}
    assert len(names) == 10
    assert all("/" not in name for name in names)
    assert file_name("ddp", dict(reversed(base.items()))) == file_name("ddp", base)


def test_an_exception_is_a_cell_with_its_last_line():
    def run(parameters, device):
        raise ValueError("a wrong value\nand more")

    cell = measure(replace(find("norm"), run=run), {"device": "cpu"})
    assert (cell["status"], cell["message"]) == ("error", "ValueError: a wrong value")
    validate(cell)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_selecting_cells(tmp_path):
    from bench_tools import cell

    cells = [cell(a="x", n=1, causal=False), cell(a="y", n=2, causal=True)]
    assert select(cells, "") == cells
    assert select(cells, "a=y,n=2") == cells[1:]
    assert select(cells, "causal=yes") == cells[1:]
    for wrong in ("b=1", "a", "a=z"):
        with pytest.raises(UserError, match="--where"):
            select(cells, wrong)


def test_the_parent_of_a_sweep_needs_no_gpu_context():
    import torch

    assert "torch" in sys.modules
    sweep_module.resolve_device("auto")
    assert not torch.cuda.is_initialized()
