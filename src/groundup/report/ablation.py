"""The table and the picture of an ablation."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from groundup.files import write_atomic
from groundup.report.plots import plot_runs
from groundup.rows import read_rows
from groundup.train.ablate import Outcome


def ablation_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: the baseline first, then from the best validation loss to the worst, those without one last.

    A run that was stopped is told from one that failed: the first can go on.
    """
    worst = float("inf")
    ranked = sorted(outcomes[1:], key=lambda o: worst if o.valid_loss is None else o.valid_loss)
    rows = [
        (
            o.name,
            _result(o),
            "" if o.change is None else f"{o.change:+.4f}",
            "" if o.tokens_per_second is None else f"{o.tokens_per_second:,.0f}",
            f"{o.parameters:,}",
        )
        for o in (outcomes[0], *ranked)
    ]
    headers = ("variation", "validation loss", "change", "tokens/s", "parameters")
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=("left", *["right"] * 4))
    failures = [f"\n{o.name} failed after {o.steps} steps: {o.failed}" for o in outcomes if o.failed]
    return "\n".join([table, *failures]) + "\n"


def _result(outcome: Outcome) -> str:
    if outcome.valid_loss is not None:
        return f"{outcome.valid_loss:.4f}"
    if outcome.failed:
        return "failed"
    missing = ", not evaluated" if outcome.steps == outcome.planned_steps else ""
    return f"not finished ({outcome.steps} of {outcome.planned_steps} steps{missing})"


def write_ablation(outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Write ablation.md, ablation.json and ablation.png (the curves of all runs with a step) into `out`."""
    files = [out / f"ablation.{kind}" for kind in ("md", "json", "png")]
    write_atomic(files[0], ablation_table(outcomes))
    write_atomic(files[1], json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    drawable = [
        out / o.name for o in outcomes if any("loss" in row for row in read_rows(out / o.name / "metrics.jsonl"))
    ]
    plot_runs(drawable, files[2])
    return files
