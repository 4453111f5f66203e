"""Cells as a line plot: one line for each combination of the parameters that are not on the horizontal axis."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from groundup.bench.benchmark import Benchmark
from groundup.bench.cells import UNITS, Cell
from groundup.bench.tables import varying_parameters
from groundup.errors import UserError

SUFFIXES = (".png", ".pdf", ".svg")


def plot(benchmark: Benchmark, cells: Sequence[Cell], path: Path) -> None:
    """Draw benchmark.plot_y over benchmark.plot_x. Raises UserError where there is nothing to draw."""
    check_plot(benchmark, str(path))
    lines = series(benchmark, cells)
    if not lines:
        raise UserError(f"--plot {path}: no cell of {benchmark.name} has a number to draw")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for label, (xs, ys, spreads) in lines.items():
        axes.errorbar(xs, ys, yerr=spreads, label=label or None, marker="o", markersize=4, capsize=2, linewidth=1.2)
    if all(isinstance(x, int) for xs, _, _ in lines.values() for x in xs):
        ticks = sorted({x for xs, _, _ in lines.values() for x in xs})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel(benchmark.plot_x.replace("_", " "))
    axes.set_ylabel(f"{benchmark.plot_y.replace('.', ' ')}, {UNITS.get(benchmark.plot_y.split('.')[0], '')}")
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small", ncols=1 + len(lines) // 12)
    stamps = {f"{c['environment'].get('gpu') or c['environment'].get('cpu')}" for c in cells if c["environment"]}
    axes.set_title(f"{benchmark.name} on {', '.join(sorted(stamps))}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def check_plot(benchmark: Benchmark, path: str) -> None:
    """Raises UserError, before a sweep and not after it, for what cannot be drawn and for a format not offered."""
    if not benchmark.plot_x:
        raise UserError(f"--plot {path}: {benchmark.name} has nothing to draw; --table writes its figures")
    if not path.endswith(SUFFIXES):
        raise UserError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")


def series(benchmark: Benchmark, cells: Sequence[Cell]) -> dict[str, tuple[list, list[float], list[float]]]:
    """Label → x values, y values, standard deviations; ordered by x, cells without a number left out."""
    others = [name for name in varying_parameters(benchmark, cells) if name != benchmark.plot_x]
    found: dict[str, list[tuple[Any, float, float]]] = {}
    for cell in cells:
        value = cell["metrics"].get(benchmark.plot_y)
        if cell["status"] != "ok" or value is None:
            continue
        y, spread = (value["mean"], value["std"]) if isinstance(value, dict) else (value, 0.0)
        label = ", ".join(f"{name.replace('_', ' ')} {cell['parameters'][name]}" for name in others)
        found.setdefault(label, []).append((cell["parameters"][benchmark.plot_x], y, spread))
    numeric = {label: sorted(points) if isinstance(points[0][0], int) else points for label, points in found.items()}
    return {label: tuple(map(list, zip(*points, strict=True))) for label, points in numeric.items()}  # type: ignore[misc]
