"""Predicted, measured, error: the account's predictions held against the `step` benchmark's cells.

Targets: counts (parameters, optimizer state, gradients, FLOPs) exact; memory held between steps 1%; peak memory 5%
and step time 15%, both in eager mode. What was not measured (memory on the CPU) or is not predicted (a compiled
model's peak and step time) is said to be so, never passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groundup.account import Setting, predict_step
from groundup.account.hardware import named_by_driver
from groundup.bench.benchmark import config_of
from groundup.bench.cells import Cell


@dataclass(frozen=True)
class Line:
    """One quantity: its key in predictions and measurements, and the largest relative error (0: exact)."""

    key: str
    target: float
    eager_only: bool = False


LINES = (
    Line("parameters.total", 0.0),
    Line("memory.gradients", 0.0),
    Line("memory.optimizer", 0.0),
    Line("flops.forward", 0.0),
    Line("flops.backward", 0.0),
    Line("memory.static", 0.01),
    Line("memory.peak", 0.05, eager_only=True),
    Line("time.step", 0.15, eager_only=True),
)


def check_steps(cells: Sequence[Cell], hardware: str = "") -> list[dict[str, Any]]:
    """A row for each line of each measured cell.

    Row: cell, line, predicted, measured, error (predicted / measured - 1), target, met (None where there is nothing
    to compare, with `reason`).
    """
    rows = []
    for cell in cells:
        if cell["status"] == "ok":
            rows.extend(_check_cell(cell, hardware))
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows outside their target."""
    return [row for row in rows if row["met"] is False]


def _check_cell(cell: Cell, hardware: str) -> list[dict[str, Any]]:
    parameters, metrics = cell["parameters"], cell["metrics"]
    predicted = predictions(cell, hardware or hardware_of(cell))
    label = " ".join(str(parameters[name]) for name in ("size", "mode", "precision", "context_length"))
    if parameters["mode"] == "forward" and parameters["grad"] == "off":
        label += " no_grad"
    if parameters["compile"] != "no":
        label += f" compiled {parameters['compile']}"
    rows = []
    for line in LINES:
        if line.key == "flops.backward" and parameters["mode"] == "forward":
            continue
        measured = metrics.get(line.key)
        if isinstance(measured, dict):
            measured = measured["median"]
        reason = ""
        if line.eager_only and parameters["compile"] != "no":
            reason = "eager only"
        elif measured is None:
            reason = "not measured"
        elif predicted.get(line.key) is None:
            reason = "no prediction" if line.key != "time.step" else "no peaks for this device: --hardware"
        rows.append(_row(label, line, predicted.get(line.key), measured, reason))
    return rows


def _row(label: str, line: Line, predicted: float | None, measured: float | None, reason: str) -> dict[str, Any]:
    error = met = None
    if not reason and predicted is not None and measured is not None:
        error = predicted / measured - 1 if measured else float(predicted != measured)
        met = predicted == measured if line.target == 0 else abs(error) <= line.target
    return {
        "cell": label,
        "line": line.key,
        "predicted": predicted,
        "measured": measured,
        "error": error,
        "target": "exact" if line.target == 0 else f"{line.target:.0%}",
        "met": met,
        "reason": reason,
    }


def hardware_of(cell: Cell) -> str:
    """The account's entry for the GPU a cell was measured on, its measured peaks where it has them; "" for none."""
    found = named_by_driver(str(cell["environment"].get("gpu", "")))
    return found.name if found else ""


def predictions(cell: Cell, hardware: str) -> dict[str, float]:
    """The account's figures for a cell, under the metric names of `step`; no times where the device is unknown."""
    parameters = cell["parameters"]
    config = config_of(parameters)
    setting = Setting.on_gpu(
        config,
        batch=parameters["batch_size"],
        context=parameters["context_length"],
        mode=parameters["mode"],
        precision="bf16-mixed" if parameters["precision"] == "bf16" else parameters["precision"],
        grad=parameters["grad"] == "on",
        optimizer=cell["environment"].get("optimizer", "lists"),
    )
    # Memory does not depend on the device's rates, and times are dropped where there is none.
    found = predict_step(config, setting, hardware or "h200-measured")
    found["flops.backward"] += found["flops.recompute"]  # the counter cannot tell them apart
    return {name: value for name, value in found.items() if hardware or not name.startswith("time.")}
