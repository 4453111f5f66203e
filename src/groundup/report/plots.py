"""Loss curves as a picture: one run, or several on the same axes.

Each run gets a colour: every step's training loss faint, its moving average as a line, the validation losses as
points. Nothing of pyplot is used, so a plot leaves no global figure, back-end or style behind.
"""

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from groundup.errors import UserError
from groundup.files import write_atomic
from groundup.report.runlog import RunLog, read_run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
"""Okabe and Ito's palette, which colour-blind readers tell apart; further runs repeat it dashed."""
INK, MUTED, FAINT = "#333333", "#777777", "#DDDDDD"
TICK_DIGITS = (
    (1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 4, 5, 7),
    (1, 2, 5),
)
"""Leading digits of the ticks on a logarithmic loss axis, from dense to sparse."""
INSIDE = 3
"""Most runs whose legend stands inside the axes."""
COLUMN = {"step": "step", "tokens": "tokens", "time": "seconds"}


def plot_runs(runs: list[Path], out: Path, x: Literal["step", "tokens", "time"] = "step") -> None:
    """Draw the losses of `runs` (run directories) against `x` into the PNG `out`, replaced atomically.

    time is training wall-clock since the run's start. Raises UserError when a run has no metrics, or none by `x`.
    """
    out = Path(out)
    if not runs:
        raise UserError("no runs to plot; give at least one run directory")
    if x not in COLUMN:
        raise UserError(f'x is "{x}"; it must be one of step, tokens, time')
    check_png(out)
    logs = [read_run(run) for run in runs]
    figure = Figure(figsize=(8 if len(logs) <= INSIDE else 10.5, 4.8), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    names = short_names([log.path for log in logs])
    unit, x_label = _x_unit(logs, x)
    for index, log in enumerate(logs):
        _draw_run(axes, log, x, unit, _colour(index), _line_style(index))
    _style(axes, x_label, x)
    _legend(figure, axes, logs, names)
    save_png(figure, out)


def check_png(path: Path) -> None:
    """Raise UserError unless `path` can name a PNG, before any work is done for it."""
    if path.suffix.lower() != ".png" or path.is_dir():
        raise UserError(f"{path}: the plot is a PNG picture; give a file name that ends in .png")


def save_png(figure: Figure, path: Path) -> None:
    """Write the picture; a reader sees the old file or the whole new one."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_atomic(path, picture.getvalue())


def frame(axes: Axes, x_label: str) -> None:
    """Labels, spines, ticks and grid of a plot of losses."""
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(True, color=FAINT, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def moving_average(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over the 2 · half_width + 1 entries around each one.

    Centred, so a falling curve is not drawn late, as an exponential average would. Towards the start, where losses fall
    steeply, the window shrinks on both sides; at the end, where they are flat, only on the side that runs out, so the
    curve does not end in a single step's noise. Non-finite entries are left out of the means; where a window holds
    nothing else the result is NaN. O(n) by prefix sums.
    """
    n = len(values)
    finite = np.isfinite(values)
    # Prefix sums of deviations: long runs then lose no digits to a large total.
    centre = values[finite].mean() if finite.any() else 0.0
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values - centre, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(n)
    half = np.minimum(half_width, index)
    low, high = index - half, np.minimum(index + half + 1, n)
    n_finite = counts[high] - counts[low]
    means = centre + (sums[high] - sums[low]) / np.maximum(n_finite, 1)
    return np.where(n_finite > 0, means, np.nan)


def thinned(x: np.ndarray, y: np.ndarray, buckets: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 · buckets points with the same outline: the smallest and largest y of each bucket of neighbours."""
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(y) <= 2 * buckets:
        return x, y
    edges = np.linspace(0, len(y), buckets + 1).astype(int)
    chosen = set()
    for start, end in pairwise(edges):
        chosen |= {start + int(y[start:end].argmin()), start + int(y[start:end].argmax())}
    index = np.array(sorted(chosen))
    return x[index], y[index]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Directory names, each with as many parents as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    names = []
    for own in parts:
        depth = 1
        while depth < len(own) and any(other != own and other[-depth:] == own[-depth:] for other in parts):
            depth += 1
        names.append("/".join(own[-depth:]))
    return names


def _draw_run(axes: Axes, log: RunLog, x: str, unit: float, colour: str, style: Literal["-", "--"]) -> None:
    if log.train["step"].size:
        along, loss = log.train_axis(COLUMN[x]) / unit, log.train["loss"]
        axes.plot(*thinned(along, loss), color=colour, alpha=0.22, linewidth=0.8, zorder=2)
        smooth = moving_average(loss, max(1, len(loss) // 60))
        axes.plot(*thinned(along, smooth), style, color=colour, linewidth=1.8, zorder=3)
    if log.valid["step"].size:
        along, loss = log.valid_axis(COLUMN[x]) / unit, log.valid["valid_loss"]
        axes.plot(along, loss, "o", color=colour, markersize=5, markeredgecolor="white", markeredgewidth=0.9, zorder=4)


def _x_unit(logs: Sequence[RunLog], x: str) -> tuple[float, str]:
    """What the x values are divided by, and the axis' label: one unit for all runs, from the longest."""
    if x != "time":
        return 1.0, {"step": "optimizer step", "tokens": "training tokens"}[x]
    longest = max(np.nanmax(log.train_axis("seconds")) for log in logs)
    unit, name = (3600.0, "hours") if longest >= 7200 else (60.0, "minutes") if longest >= 120 else (1.0, "seconds")
    return unit, f"training time ({name})"


def _style(axes: Axes, x_label: str, x: str) -> None:
    frame(axes, x_label)
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    if x != "time":
        axes.xaxis.set_major_formatter(FuncFormatter(_count))
    _scale_loss(axes)


def _scale_loss(axes: Axes) -> None:
    """A logarithmic loss axis with plain numbers.

    The first steps fall by whole nats, the last by hundredths; a linear axis spends its height on the former. Losses
    that come near zero (a text learnt by heart) would do the opposite to a logarithmic axis, so those stay linear.
    """
    losses = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    losses = losses[np.isfinite(losses)]
    if losses.size and losses.min() > 0 and losses.max() < 30 * losses.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_loss_ticks(*axes.get_ylim())))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _loss_ticks(low: float, high: float) -> Sequence[float]:
    """Plain numbers within [low, high], spread about evenly on a logarithmic axis, eleven at most."""
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for digits in TICK_DIGITS:
        ticks = np.outer(decades, digits).ravel()
        ticks = ticks[(ticks >= low) & (ticks <= high)]
        if 5 <= len(ticks) <= 11:
            return ticks.tolist()
    return MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)


def _count(value: float, _position: int) -> str:
    """12000 → 12k, 2500000 → 2.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _legend(figure: Figure, axes: Axes, logs: Sequence[RunLog], names: Sequence[str]) -> None:
    """The runs with their last validation loss, then what a faint line, a line and a point are."""
    handles = []
    for index, (log, name) in enumerate(zip(logs, names, strict=True)):
        evaluated = log.valid["step"].size > 0
        label = f"{name} (last validation {log.valid['valid_loss'][-1]:.3f})" if evaluated else name
        handles.append(Line2D([], [], color=_colour(index), linestyle=_line_style(index), linewidth=1.8, label=label))
    kinds = [
        Line2D([], [], color=MUTED, linewidth=0.8, label="training, each step"),
        Line2D([], [], color=MUTED, linewidth=1.8, label="training, moving average"),
        Line2D([], [], color=MUTED, linestyle="", marker="o", markersize=5, label="validation"),
    ]
    # Falling curves leave the upper right corner free; a long list would reach down into them.
    crowded = len(logs) > INSIDE
    place = figure.legend if crowded else axes.legend
    loc = "outside right upper" if crowded else "upper right"
    legend = place(handles=handles + kinds, loc=loc, frameon=True, fontsize=9, labelcolor=INK)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _line_style(index: int) -> Literal["-", "--"]:
    return "-" if index < len(COLOURS) else "--"
