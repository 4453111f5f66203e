"""A cell: one measured point of a benchmark, as plain JSON (schema.json beside this file holds its form).

A cell is named by its parameters, everything that was asked for, and holds what came of it: a status, metrics and
the stamp of the environment. One file a cell makes a sweep resumable and safe to interrupt; a document holds many.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from groundup.errors import UserError, nearest_name
from groundup.files import write_atomic

SCHEMA = 1
"""Version of the form; a reader refuses any other."""

UNITS = {"time": "ms", "memory": "bytes", "bandwidth": "GB/s", "flops": "FLOP", "parameters": "count"}
"""Unit by a metric's first word. GB are 1e9 bytes; a multiply-add counts as two FLOP."""

Parameters = dict[str, Any]
"""Name → a string, number or bool."""
Cell = dict[str, Any]


def make_cell(
    benchmark: str,
    parameters: Parameters,
    status: str,
    message: str = "",
    metrics: Mapping[str, Any] | None = None,
    notes: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Cell:
    """A cell as a JSON object. status: ok, oom, error or timeout; `message` says more about the last three."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "parameters": parameters,
        "status": status,
        "message": message,
        "units": UNITS,
        "metrics": dict(metrics or {}),
        "notes": dict(notes or {}),
        "environment": dict(environment or {}),
    }


def file_name(benchmark: str, parameters: Parameters) -> str:
    """A readable and unique file name, whatever the parameters' order: name and values, then a digest of all."""
    ordered = sorted(parameters.items())
    digest = sha256(json.dumps([benchmark, ordered]).encode()).hexdigest()[:10]
    words = [benchmark, *(value for _, value in ordered if isinstance(value, str) and value)]
    words += [f"{name.replace('_', '')}{value}" for name, value in ordered if type(value) is int]
    slug = "".join(c if c.isalnum() or c in ".-" else "_" for c in "-".join(words))[:100]
    return f"{slug}-{digest}.json"


def write_cell(directory: Path, cell: Cell) -> None:
    """Write the cell to its own file; a reader sees all of it or nothing."""
    write_atomic(directory / file_name(cell["benchmark"], cell["parameters"]), json.dumps(cell, indent=1) + "\n")


def read_cell(directory: Path, benchmark: str, parameters: Parameters) -> Cell | None:
    """The cell measured earlier, or None. Raises UserError when its file is corrupt."""
    path = directory / file_name(benchmark, parameters)
    return next(_cells_of(path), None) if path.exists() else None


def document(benchmark: str, cells: Sequence[Cell], check: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Many cells as one JSON object; `check` holds predictions beside measurements, when they were asked for."""
    whole: dict[str, Any] = {"schema": SCHEMA, "benchmark": benchmark, "cells": list(cells)}
    return whole if check is None else whole | {"check": list(check)}


def read_results(paths: Iterable[Path]) -> list[Cell]:
    """All cells of result files and of the .json files in directories. Raises UserError when there are none."""
    paths = list(paths)
    cells: list[Cell] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"no such result file or directory: {path}")
        files = sorted(path.rglob("[!.]*.json")) if path.is_dir() else [path]
        for file in files:
            cells.extend(_cells_of(file))
    if not cells:
        raise UserError(f"no benchmark cells in {', '.join(map(str, paths))}")
    # A directory's cells come by name; a reader wants them as the sweep went: the outer loops outside.
    return sorted(cells, key=lambda cell: cell["environment"].get("measured_at", "~"))


def select(cells: Sequence[Cell], where: str) -> list[Cell]:
    """The cells whose parameters have the values of `where`, e.g. "compile=no,precision=fp32". Raises UserError."""
    for condition in (word for word in where.split(",") if word):
        name, equals, value = condition.partition("=")
        names = {known for cell in cells for known in cell["parameters"]}
        if not equals or name not in names:
            raise UserError(f'--where "{condition}": give NAME=VALUE of a parameter{nearest_name(name, names)}')
        cells = [cell for cell in cells if written(cell["parameters"].get(name)) == value]
    if not cells:
        raise UserError(f'--where "{where}": no cell has these values')
    return list(cells)


def written(value: Any) -> str:
    """A parameter as tables show it and `--where` takes it: yes and no for booleans."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _cells_of(path: Path) -> Iterator[Cell]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not readable JSON: {error}; delete it to measure again") from None
    known = isinstance(whole, dict) and whole.get("schema") == SCHEMA
    cells = whole.get("cells", [whole]) if known else []
    if not all(isinstance(cell, dict) and {"parameters", "metrics", "status"} <= cell.keys() for cell in cells):
        known = False
    if not known:
        raise UserError(f"{path} holds no benchmark cells of schema {SCHEMA}; give files that groundup bench wrote")
    yield from cells
