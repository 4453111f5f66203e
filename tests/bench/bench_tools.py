"""Shared by the tests of bench/: a worker in this process, the schema, and cells made by hand."""

import json
from pathlib import Path

import jsonschema
import torch
import torch.distributed as dist

import groundup.bench
from groundup.bench import sweep as sweep_module
from groundup.bench.benchmark import find
from groundup.bench.cells import make_cell
from groundup.bench.worker import measure
from groundup.parallel.processes import connect, disconnect, this_world

SCHEMA = json.loads((Path(groundup.bench.__file__).parent / "schema.json").read_text())

TINY = {
    "step": {"size": "tiny", "context": "8", "mode": "train-step", "warmup": "1", "steps": 2},
    "attention": {"d": "4", "context": "8", "implementation": "eager", "warmup": 1, "steps": 2},
    "norm": {"hidden": "8", "rows": "4", "implementation": "eager,layer_norm,rms_norm", "warmup": 1, "steps": 2},
    "loss": {"tokens": "8", "vocab": "9", "hidden": "8", "implementation": "eager,chunked", "warmup": 1, "steps": 2},
    "optimizer": {"size": "tiny", "warmup": 1, "steps": 2},
    "generate": {"size": "tiny", "prompt": "8", "batch": "1,3", "precision": "fp32", "prefills": 2, "steps": 3},
    "mixed-precision": {},
    "tokenizer": {"max_bytes": 20_000, "vocab_size": "300", "steps": 2, "tool": "groundup,tiktoken"},
    "allreduce": {"kib": "4", "warmup": 1, "steps": 2},
    "ddp": {"size": "tiny", "context": "8", "engine": "bucketed", "bucket_mb": "1", "warmup": 1, "steps": 2},
    "sharding": {"size": "tiny", "context": "8", "engine": "zero1", "warmup": 1, "steps": 2},
}


def validate(document):
    """Against schema.json, after a round through JSON text."""
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(document, allow_nan=False)))


def tiny_cells(name, **changes):
    """The cells of a benchmark at sizes that a CPU measures in milliseconds, measured in this process."""
    benchmark = find(name)
    options = benchmark.options(device="cpu", **(TINY[name] | changes))
    return [measure(benchmark, parameters) for parameters in benchmark.cells(options)]


def tiny_cells_of(names):
    """tiny_cells of several benchmarks; on every rank of a world, those of many processes measure in that world."""
    return {name: tiny_cells(name) for name in names} | {"seed": tiny_cells("ddp", seed=1)}


def backends_of_all_reduce():
    """On every rank: the back-ends that cells of `allreduce` used where the ranks are connected by another one; and
    whether ranks whose connection broke meet again at the same store."""
    import torch.testing._internal.distributed.fake_pg  # registers the back-end

    world, cpu = this_world(), torch.device("cpu")
    connect(world, cpu, backend="fake")
    seen, real = set(), dist.all_reduce

    def spy(tensor, *rest, group=None):
        seen.add(dist.get_backend(group))
        return real(tensor, *rest, group=group)

    dist.all_reduce = spy
    statuses = [cell["status"] for cell in tiny_cells("allreduce", kib="4,8")]
    dist.all_reduce = real
    disconnect()
    again = [cell["status"] for cell in tiny_cells("allreduce", kib="4")]
    return statuses, seen, again


class InProcess:
    """Takes the place of sweep.Worker: no process, so that a sweep's logic is tested in milliseconds."""

    started = 0

    def __init__(self, benchmark):
        self.benchmark = benchmark
        type(self).started += 1

    def measure(self, parameters, time_limit):
        flags = torch.get_float32_matmul_precision()
        try:
            return measure(self.benchmark, parameters)
        finally:
            torch.set_float32_matmul_precision(flags)

    def stop(self):
        pass


def in_process(monkeypatch):
    """Sweeps measure in this process for the rest of the test."""
    InProcess.started = 0
    monkeypatch.setattr(sweep_module, "Worker", InProcess)


def time_summary(median, std=0.0):
    return {
        "mean": median,
        "std": std,
        "median": median,
        "p10": median,
        "p90": median,
        "min": median,
        "max": median,
        "n": 5,
    }


def cell(benchmark="norm", status="ok", message="", metrics=None, **parameters):
    """A cell as a sweep would write it."""
    stamp = {"device": "cpu", "cpu": "a processor", "torch": "2.11.0", "tf32": False, "dtype": "float32"}
    return make_cell(benchmark, parameters | {"device": "cpu"}, status, message, metrics or {}, {}, stamp)
