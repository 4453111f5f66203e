"""The process that measures: parameters come through a pipe, cells go back.

A separate process because an out-of-memory, a crash of the driver or a leak must cost one cell, not the sweep, and
because one process's allocator and compiler state must not colour the next group's numbers. Cells of one group share
a process, so that torch is not imported for each. After anything but success the process ends: what an
out-of-memory leaves behind is not a clean place to measure in.
"""

import gc
import json
import os
import sys
import traceback
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from groundup.bench.benchmark import Benchmark
from groundup.bench.cells import Cell, Parameters, make_cell
from groundup.bench.environment import environment
from groundup.parallel.launch import end_with_parent
from groundup.train.guards import is_out_of_memory


def serve(pipe: Connection, module: str, errors: str, parent: int) -> None:
    """Measure the parameters that come through `pipe` until one cell fails. All that is printed goes to `errors`.

    The first answer says that the imports are done: a cell's time limit may start.
    """
    # A session of its own: all of it can be stopped at once.
    os.setsid()
    file = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    end_with_parent(parent)
    benchmark: Benchmark = import_module(module).BENCHMARK
    pipe.send("ready")
    for index in count():
        cell = measure(benchmark, pipe.recv(), {"earlier_cells_in_process": index})
        pipe.send(json.dumps(cell))
        if cell["status"] != "ok":
            return


def measure(benchmark: Benchmark, parameters: Parameters, stamp: dict[str, Any] | None = None) -> Cell:
    """One cell, whatever happens to it; `stamp` joins the environment."""
    device = torch.device(parameters["device"])
    clear(device)
    torch.manual_seed(parameters.get("seed", 0))
    torch.set_float32_matmul_precision("highest")
    common = (stamp or {}) | {"seed": parameters.get("seed", 0)}
    try:
        result = benchmark.run(parameters, device)
    except Exception as error:
        traceback.print_exc()
        last = traceback.format_exception_only(error)[-1].strip().split("\n")[0]
        status = "oom" if is_out_of_memory(error) else "error"
        return make_cell(benchmark.name, parameters, status, last, environment=environment(device) | common)
    seen = environment(device) | common | {"grad_mode": "grad", "step": "steady"} | dict(result.stamp)
    notes = dict(result.notes)
    if any(name.startswith("memory.") and value is None for name, value in result.metrics.items()):
        notes["memory"] = "the allocator is not measured on the CPU: null"
    return make_cell(benchmark.name, parameters, "ok", "", result.metrics, notes, seen)


def clear(device: torch.device) -> None:
    """Give back what the previous cell left: compiled code, cached blocks, cuBLAS's workspaces."""
    if "torch._dynamo" in sys.modules:  # importing it only to reset it would cost seconds
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Workspaces live in torch's allocator and would count as the next cell's memory.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
