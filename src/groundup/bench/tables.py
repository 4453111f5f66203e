"""Cells as a table: Markdown or LaTeX, with everything that all cells share said once below it."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from groundup.bench.benchmark import Benchmark
from groundup.bench.cells import Cell, written

_FORMATS = {"markdown": "pipe", "latex": "latex_booktabs", "plain": "simple"}

_WRITTEN = {"oom": "OOM", "error": "error", "timeout": "timeout"}
_STAMP = ("gpu", "driver", "cpu", "threads", "torch", "triton", "cuda", "dtype", "tf32", "grad_mode", "step", "method")


def table(benchmark: Benchmark, cells: Sequence[Cell], form: str = "markdown") -> str:
    """Rows are cells, columns the parameters that vary and the metrics that any cell has.

    A cell that was not measured shows its status in its first metric column. `form`: markdown, latex or plain.
    """
    columns = benchmark.columns.items()
    shown = {title: m for title, m in columns if any(cell["metrics"].get(m) is not None for cell in cells)}
    varying = varying_parameters(benchmark, cells)
    rows = []
    for cell in cells:
        values = [_number(metric, cell["metrics"].get(metric)) for metric in shown.values()]
        if cell["status"] != "ok":
            values = [_WRITTEN[cell["status"]], *[""] * (len(shown) - 1)] if shown else []
        rows.append([written(cell["parameters"].get(name)) for name in varying] + values)
    titles = [name.replace("_", " ") for name in varying] + [*shown]
    # Numbers are already written as they should be; tabulate would round them again.
    text = tabulate(rows, headers=titles, tablefmt=_FORMATS[form], disable_numparse=True)
    lines = [text, "", *_below(benchmark, cells)]
    if form == "latex":
        lines = [text, *(f"% {line}" for line in _below(benchmark, cells))]
    return "\n".join(lines)


def progress_line(benchmark: Benchmark, cell: Cell) -> str:
    """One finished cell in one line: what was asked for, what came out."""
    hidden = (*benchmark.hidden, "seed", "steps", "device")
    asked = " ".join(written(value) for name, value in cell["parameters"].items() if name not in hidden)
    if cell["status"] != "ok":
        return f"{asked}: {_WRITTEN[cell['status']]} ({cell['message'][:150]})"
    values = [(title, _number(metric, cell["metrics"].get(metric))) for title, metric in benchmark.columns.items()]
    return f"{asked}: " + ", ".join(f"{title} {value}" for title, value in values if value)


def varying_parameters(benchmark: Benchmark, cells: Sequence[Cell]) -> list[str]:
    """Names of the parameters that differ between cells, in the benchmark's order."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["parameters"]))
    hidden = benchmark.hidden
    return [
        name for name in names if name not in hidden and len({repr(cell["parameters"].get(name)) for cell in cells}) > 1
    ]


def _below(benchmark: Benchmark, cells: Sequence[Cell]) -> list[str]:
    """What the cells share, and what they were measured with; a stamp that differs lists its values."""
    varying = varying_parameters(benchmark, cells)
    first = cells[0]["parameters"]
    fixed = [f"{k.replace('_', ' ')} {written(v)}" for k, v in first.items() if k not in (*varying, *benchmark.hidden)]
    stamps = []
    for name in _STAMP:
        values = {written(cell["environment"][name]) for cell in cells if cell["environment"].get(name) is not None}
        if values:
            stamps.append(f"{name.replace('_', ' ')} {' | '.join(sorted(values))}")
    lines = [f"All rows: {', '.join(fixed)}.", f"Measured with: {'; '.join(stamps)}."]
    if any(metric.startswith("time.") for metric in benchmark.columns.values()):
        lines.append("Times: mean ± standard deviation of the timed steps. GiB = 2^30 bytes, GB = 1e9 bytes.")
    failures = {f"{_WRITTEN[c['status']]}: {c['message']}" for c in cells if c["status"] in ("error", "timeout")}
    return lines + sorted(failures)


def _number(metric: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{_digits(value['mean'])} ± {_digits(value['std'])}"
    kind = metric.split(".")[0]
    if kind == "sum":
        return f"{value:.4f}"
    if kind == "memory":
        return f"{value / 2**30:.2f}"
    return figure(value)


def figure(value: Any) -> str:
    """A number as a table shows it; anything else as it is."""
    if isinstance(value, float):
        return _digits(value)
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def _digits(value: float) -> str:
    """Four significant digits or so, without an exponent."""
    for limit, places in ((100, 0 if value >= 10_000 else 1), (10, 2), (1, 3)):
        if abs(value) >= limit:
            return f"{value:,.{places}f}"
    return f"{value:.4f}"


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    """Predictions beside measurements, a line each."""
    body = [
        [
            row["cell"],
            row["line"],
            figure(row["predicted"]),
            figure(row["measured"]),
            "" if row["error"] is None else f"{row['error']:+.2%}",
            row["target"],
            {True: "ok", False: "MISSED", None: row["reason"]}[row["met"]],
        ]
        for row in rows
    ]
    titles = ["cell", "line", "predicted", "measured", "error", "target", ""]
    return tabulate(body, headers=titles, disable_numparse=True)
