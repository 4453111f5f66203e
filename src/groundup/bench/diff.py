"""Two result sets side by side: what changed, and whether by more than the measurements scatter.

Cells are joined by their parameters. A time or a rate has changed when the medians differ by more than the two
standard deviations together: a rule that a single machine's noise seldom breaks. Everything else (bytes, counts) is
exact and has changed when it differs. The spread between two processes can exceed the spread within one, so measure
the same version twice before trusting a small change.
"""

import json
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from groundup.bench.benchmark import find
from groundup.bench.cells import Cell
from groundup.bench.tables import figure
from groundup.errors import UserError

IGNORED = ("steps", "seed")
"""Parameters that do not make a cell another one."""


def diff(old: Sequence[Cell], new: Sequence[Cell]) -> list[dict[str, Any]]:
    """Rows {cell, metric, old, new, ratio, changed} for every metric of the cells in both; UserError if none is.

    ratio is new / old (None where old is 0 or either is no number); a changed status is a row of its own.
    """
    before = {_key(cell): cell for cell in old}
    rows = []
    for cell in new:
        other = before.get(_key(cell))
        if other is None:
            continue
        label = _label(cell)
        if other["status"] != cell["status"]:
            rows.append(_row(label, "status", other["status"], cell["status"], None, True))
        for metric, value in cell["metrics"].items():
            past = other["metrics"].get(metric)
            if past is None or value is None:
                continue
            rows.append(_compare(label, metric, past, value))
    if not rows:
        raise UserError("no cell is in both results; compare sweeps of the same benchmark with the same parameters")
    return rows


def _key(cell: Cell) -> str:
    asked = {name: value for name, value in cell["parameters"].items() if name not in IGNORED}
    return json.dumps([cell["benchmark"], asked], sort_keys=True)


def _label(cell: Cell) -> str:
    skipped = (*IGNORED, *find(cell["benchmark"]).hidden, "device", "warmup")
    words = [f"{name} {value}" for name, value in cell["parameters"].items() if name not in skipped]
    return f"{cell['benchmark']}: {', '.join(words)}"


def _compare(label: str, metric: str, past: Any, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and isinstance(past, dict):
        ratio = value["median"] / past["median"] if past["median"] else None
        changed = abs(value["median"] - past["median"]) > value["std"] + past["std"]
        return _row(label, metric, past["median"], value["median"], ratio, changed)
    if isinstance(value, int | float) and isinstance(past, int | float):
        ratio = value / past if past else None
        # A rate is derived from a time that has its own row with its own spread.
        derived = metric.startswith(("bandwidth.", "tokens_per_second", "time."))
        return _row(label, metric, past, value, ratio, None if derived else value != past)
    return _row(label, metric, past, value, None, value != past)


def _row(label: str, metric: str, old: Any, new: Any, ratio: float | None, changed: bool | None) -> dict[str, Any]:
    return {"cell": label, "metric": metric, "old": old, "new": new, "ratio": ratio, "changed": changed}


def diff_table(rows: Sequence[dict[str, Any]], everything: bool = False) -> str:
    """The times and whatever changed; with `everything` all rows. `changed` None: derived from another row."""
    body = []
    for row in rows:
        if not (everything or row["changed"] or (row["changed"] is not None and row["metric"].startswith("time."))):
            continue
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        verdict = {True: "changed", False: "within the spread", None: ""}[row["changed"]]
        body.append([row["cell"], row["metric"], figure(row["old"]), figure(row["new"]), ratio, verdict])
    titles = ["cell", "metric", "old", "new", "new / old", ""]
    return tabulate(body, headers=titles, disable_numparse=True)
