"""A sweep: the cells a benchmark's options ask for, measured group by group in worker processes, kept one by one.

Each finished cell is a file, so a sweep that was stopped (Ctrl-C, a deadline, a reboot) continues where it was: cells
that are there with status "ok" are not measured again. A cell that runs out of memory, crashes or exceeds its time
limit is a cell with that status; its process is replaced and the sweep goes on.

Started by torchrun or srun every rank goes through the same cells, with a worker each; rank 0 alone keeps and reports
them. `--out` must then be a directory that all machines see, so that all leave out the same cells.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from groundup.bench.benchmark import Benchmark, SweepOptions, at_least
from groundup.bench.cells import Cell, Parameters, make_cell, read_cell, write_cell
from groundup.bench.worker import serve
from groundup.errors import UserError
from groundup.parallel.processes import this_world

Progress = Callable[[int, int, Cell], None]
"""Called after each cell: its number from 1, the number of cells to measure, the cell."""


START_LIMIT = 300.0
"""Seconds a worker process may take to import torch."""


def directory_of(benchmark: Benchmark, options: SweepOptions) -> Path:
    return Path(options.out) if options.out else Path("runs") / "bench" / benchmark.name


def resolve_device(name: str) -> str:
    """auto → cuda where there is one. Raises UserError for cuda without a GPU. Creates no CUDA context."""
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    return name if name != "auto" else "cuda" if available else "cpu"


def repetitions(options: Any, least_warmup: int = 1) -> Parameters:
    """The parameters that most cells end with. Raises UserError for too few steps and for a device that is not here."""
    at_least(options.warmup, "--warmup", least_warmup)
    at_least(options.steps, "--steps", 1)
    device = resolve_device(options.device)
    return {"warmup": options.warmup, "steps": options.steps, "seed": options.seed, "device": device}


def sweep(benchmark: Benchmark, options: SweepOptions, progress: Progress | None = None) -> tuple[list[Cell], int]:
    """Measure what is missing; return every cell the options ask for that exists, and how many do not (deadline)."""
    at_least(options.time_limit, "--time-limit", 1)
    at_least(options.deadline_seconds, "--deadline-seconds", 0)
    wanted = {_key(parameters): parameters for parameters in benchmark.cells(options)}
    directory = directory_of(benchmark, options)
    found: dict[str, Cell] = {}
    for key, parameters in wanted.items():
        cell = None if options.fresh else read_cell(directory, benchmark.name, parameters)
        if cell is not None and cell["status"] == "ok":
            found[key] = cell
    missing = [parameters for key, parameters in wanted.items() if key not in found]
    end = monotonic() + options.deadline_seconds if options.deadline_seconds else float("inf")
    count, speaks = 0, this_world().rank == 0
    for group in _groups(benchmark, missing):
        worker = Worker(benchmark)
        try:
            for parameters in group:
                if monotonic() >= end:
                    break
                cell = worker.measure(parameters, options.time_limit)
                found[_key(parameters)] = cell
                count += 1
                if not speaks:
                    continue
                write_cell(directory, cell)
                if progress is not None:
                    progress(count, len(missing), cell)
        finally:
            worker.stop()
    return [found[key] for key in wanted if key in found], len(wanted) - len(found)


def _key(parameters: Parameters) -> str:
    return json.dumps(parameters, sort_keys=True)


def _groups(benchmark: Benchmark, cells: list[Parameters]) -> list[list[Parameters]]:
    """Cells that share a process, the groups in the order of their first cells."""
    groups: dict[object, list[Parameters]] = {}
    for parameters in cells:
        groups.setdefault(benchmark.group(parameters), []).append(parameters)
    return list(groups.values())


class Worker:
    """A worker process, started when it is first needed and again after it ended."""

    def __init__(self, benchmark: Benchmark):
        self.benchmark = benchmark
        self.process: Any = None

    def measure(self, parameters: Parameters, time_limit: float) -> Cell:
        """The cell, whatever becomes of the process that measures it."""
        try:
            if self.process is None:
                self._start()
                self._reply(START_LIMIT)  # starting up does not count against the cell
            self.pipe.send(parameters)
            cell = json.loads(self._reply(time_limit))
        except TimeoutError as error:
            cell = make_cell(self.benchmark.name, parameters, "timeout", str(error))
        except (EOFError, OSError):
            cell = make_cell(self.benchmark.name, parameters, "error", self._last_words())
        if cell["status"] != "ok":
            self.stop()
        return cell

    def _start(self) -> None:
        self.errors = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by stop)
        self.pipe, other = multiprocessing.Pipe()
        arguments = (other, self.benchmark.module, self.errors.name, os.getpid())
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
        # Ctrl-C is for the sweep alone, also before the process has a session of its own.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)
        other.close()

    def _reply(self, limit: float) -> str:
        if not wait([self.pipe, self.process.sentinel], limit):
            raise TimeoutError(f"stopped after the time limit of {limit:g} s")
        if not self.pipe.poll():
            raise EOFError
        return self.pipe.recv()

    def _last_words(self) -> str:
        """How the process ended and the last line it wrote to standard error."""
        self.process.join()
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = Path(self.errors.name).read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process ended ({how}): {last}" if last else f"the process ended ({how})"

    def stop(self) -> None:
        """End the process and its children, the compiler's among them."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        self.pipe.close()
        self.errors.close()
