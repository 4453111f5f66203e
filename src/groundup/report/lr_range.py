"""The curve of a learning-rate range test as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from groundup.report.plots import COLOURS, INK, MUTED, check_png, frame, save_png
from groundup.train.lr_range import LrRange


def plot_lr_range(found: LrRange, out: Path) -> None:
    """Draw loss over learning rate, with the suggestion, into the PNG `out`, replaced atomically."""
    check_png(out)
    figure = Figure(figsize=(8, 4.8), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    smoothed, rates = np.array(found.smoothed), found.rates[: len(found.losses)]
    axes.plot(rates, found.losses, color=COLOURS[0], alpha=0.3, linewidth=0.9, label="each step")
    axes.plot(rates, smoothed, color=COLOURS[0], linewidth=1.8, label="smoothed")
    label = f"suggestion {found.suggestion:.2g}"
    axes.axvline(found.suggestion, color=COLOURS[1], linewidth=1.4, label=label)
    axes.axvline(found.lowest, color=MUTED, linewidth=1.0, linestyle="--", label=f"lowest loss {found.lowest:.2g}")
    if found.diverged:
        axes.axvline(found.diverged, color=MUTED, linewidth=1.0, linestyle=":", label=f"diverged {found.diverged:.2g}")
    axes.set_xscale("log")
    # The last steps of a diverging sweep are far above all others and would flatten the rest.
    low, high = min(found.losses), smoothed.max()
    axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * max(high - low, 1e-3))
    frame(axes, "learning rate")
    axes.legend(frameon=False, labelcolor=INK)
    save_png(figure, out)
