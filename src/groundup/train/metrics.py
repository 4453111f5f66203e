"""metrics.jsonl, the truth of a run: one JSON object a line, read by groundup.rows.

A row of an optimizer step holds `step` (from 1), `loss` (nats a token, mean over all micro-batches of that step,
unrounded), `lr`, `grad_norm` (before clipping), `tokens` (seen so far), `tokens_per_second`, `mfu` (where the device's
peak is known), `memory_gib` (peak so far) and `eta_seconds`; `skipped` and `spike` are there, and true, where a guard
says so (guards.py), and a loss or norm that is not finite is null. A row of an evaluation holds `step`, `valid_loss`,
`valid_bits_per_byte`, and `sample` and `suspicious` where there is one. Nothing is averaged over steps.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import torch
from torch import Tensor

from groundup.account import GPUS
from groundup.account.flops import flops
from groundup.account.hardware import named_by_driver
from groundup.config import RunConfig
from groundup.errors import UserError
from groundup.files import write_atomic
from groundup.rows import Row, read_rows


def cut_back(path: Path, step: int) -> list[Row]:
    """Drop the rows after `step` and a torn last line, atomically; return the rows that stay."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class MetricsLog:
    """Appends rows to metrics.jsonl; a row that was written survives a kill of the process. path None: to nowhere."""

    def __init__(self, path: Path | None):
        self.path = path
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115 - open as long as the run

    def write(self, row: Row) -> None:
        """Append one row. Raises UserError when the disk is full."""
        line = json.dumps(row).encode() + b"\n"
        with self._explained():
            if self._file is not None and self._file.write(line) != len(line):
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    def sync(self) -> None:
        """Flush to disk. Raises UserError as write does."""
        with self._explained():
            if self._file is not None:
                os.fsync(self._file.fileno())

    @contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; the last checkpoint is kept: free space, then resume"
            ) from None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


class StepRows:
    """Turns the numbers of each step into a row, without making a GPU wait.

    On a GPU loss and norm are copied in the background and read when the next step has been launched: `flush` is called
    then, and after the last one. `full_mfu`: the MFU of one token a second, 0 where nobody knows.
    """

    def __init__(self, write: Callable[[Row], None], tokens_per_step: int, device: torch.device, full_mfu: float = 0.0):
        self._write = write
        self._tokens_per_step = tokens_per_step
        self._full_mfu = full_mfu
        self._device = device
        self._late = device.type == "cuda"
        self._pending: tuple[int, float, Tensor, float | torch.cuda.Event] | None = None
        self._lap = self._now()

    def put(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Take the scalars of step `step`; write the row of the step before."""
        values = torch.stack([loss, grad_norm.to(loss), skipped.to(loss)]).double().to("cpu", non_blocking=True)
        previous, self._pending = self._pending, (step, lr, values, self._now())
        if previous is not None:
            self._finish(previous)
        if not self._late:
            self.flush()

    def flush(self) -> None:
        """Write the row that is still pending."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._finish(pending)

    def restart_clock(self) -> None:
        """Do not count the time since the last row (a save, an evaluation) as training."""
        self._lap = self._now()

    def _now(self) -> float | torch.cuda.Event:
        """A point in time; on a GPU a point in its queue, as the host runs ahead and reads the rows in bursts."""
        if not self._late:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, end: float | torch.cuda.Event) -> float:
        """From the last lap to `end`, which becomes the lap; waits until the GPU has got there."""
        start, self._lap = self._lap, end
        if isinstance(end, torch.cuda.Event) and isinstance(start, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        assert isinstance(end, float)
        assert isinstance(start, float)
        return end - start

    def _finish(self, pending: tuple[int, float, Tensor, float | torch.cuda.Event]) -> None:
        step, lr, values, end = pending
        seconds = self._seconds(end)
        loss, grad_norm, skipped = values.tolist()
        speed = self._tokens_per_step / max(seconds, 1e-9)
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": lr,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "tokens": step * self._tokens_per_step,
            "tokens_per_second": speed,
        }
        if self._full_mfu:
            row["mfu"] = speed * self._full_mfu
        row["memory_gib"] = peak_memory_gib(self._device)
        if skipped:
            row["skipped"] = True
        self._write(row)


def flops_per_token(config: RunConfig) -> float:
    """FLOPs of one trained token, the account's: forward and backward of every matrix product, attention as a causal
    kernel executes it, nothing for the recompute of activation checkpointing.
    """
    return flops(config.model, 1, config.model.context_length, attention="flash")["per_token"]


def listed_tflops(device_name: str, precision: str) -> float:
    """The listed dense peak of a GPU that the driver calls `device_name`, in TFLOP/s; 0 for one not in the table."""
    found = named_by_driver(device_name)
    return GPUS[found.name.removesuffix("-measured")].matmul_tflops(precision) if found else 0.0


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """FLOP/s that one device could do at best; 0 where nobody says.

    Model FLOPs utilisation (Chowdhery et al. 2022, appendix B) = tokens a second · FLOPs a token / this.
    """
    if config.train.peak_tflops:
        return config.train.peak_tflops * 1e12
    if device.type != "cuda":
        return 0.0
    return listed_tflops(torch.cuda.get_device_name(device), config.train.precision) * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that tensors took on a GPU so far, or that the process took where there is none, in GiB (2**30)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
