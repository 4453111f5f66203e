"""The rows of `metrics.jsonl`, a run's local truth, as columns.

A row with `loss` is an optimizer step, a row with `valid_loss` an evaluation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groundup.errors import UserError
from groundup.rows import read_rows

Columns = dict[str, np.ndarray]
"""Field → float64 array over the rows, NaN where a row lacks the field; always holds `step`, increasing."""


@dataclass(frozen=True)
class RunLog:
    """The metrics of one run."""

    path: Path
    """The run's directory."""
    train: Columns
    """One entry an optimizer step: step, loss, and what else the rows carry (lr, grad_norm, tokens, …)."""
    valid: Columns
    """One entry an evaluation: step, valid_loss, …; empty arrays when there was none."""

    def train_axis(self, name: str) -> np.ndarray:
        """`step`, `tokens` or `seconds` (of training, since the run's start) at the training rows.

        Raises UserError when the rows do not say.
        """
        values = self._seconds() if name == "seconds" else self.train.get(name)
        if values is None or np.isnan(values).all():
            raise UserError(f'{self.path / "metrics.jsonl"}: its rows have no "{name}"; plot by step instead')
        return values

    def valid_axis(self, name: str) -> np.ndarray:
        """The same quantity at the evaluations: read off the training rows, between steps by straight line."""
        if name == "step":
            return self.valid["step"]
        values = self.train_axis(name)
        known = ~np.isnan(values)
        # Nothing was consumed before the first step: an evaluation at step 0 belongs at the origin.
        steps, values = self.train["step"][known], values[known]
        if steps[0] > 0:
            steps, values = np.concatenate([[0.0], steps]), np.concatenate([[0.0], values])
        return np.interp(self.valid["step"], steps, values)

    def _seconds(self) -> np.ndarray | None:
        """From each step's tokens and its speed."""
        train = self.train
        if not {"tokens", "tokens_per_second"} <= train.keys():
            return None
        return np.cumsum(np.diff(train["tokens"], prepend=0.0) / train["tokens_per_second"])


def read_run(run: Path) -> RunLog:
    """Read `run`'s metrics (`run`: the run's directory). Raises UserError: missing, empty, or corrupt in the middle."""
    run = Path(run)
    path = run / "metrics.jsonl"
    if not run.exists():
        raise UserError(f"{run}: no such run directory")
    if not path.is_file():
        raise UserError(f"{run}: no metrics.jsonl in it; give the directory that `groundup train --out` wrote")
    rows = read_rows(path)
    train = _columns([row for row in rows if "loss" in row])
    valid = _columns([row for row in rows if "valid_loss" in row])
    if not train["step"].size and not valid["step"].size:
        raise UserError(f"{path}: holds no finished step yet; train for at least one step first")
    return RunLog(run, train, valid)


def _columns(rows: list[dict[str, Any]]) -> Columns:
    """Numeric fields of the rows as columns, in the order of their steps (a later row of the same step wins)."""
    by_step = {row["step"]: row for row in rows}
    ordered = [by_step[step] for step in sorted(by_step)]
    numbers = (name for row in ordered for name, value in row.items() if type(value) in (int, float))
    # None, and a field that a row lacks, become NaN.
    return {name: np.array([row.get(name) for row in ordered], dtype=np.float64) for name in ("step", *numbers)}
