"""metrics.jsonl, read: the one reader of a run's rows. Imports no torch.

The writer is train/metrics.py, which says what a row holds. A row ends in a newline; what follows the last one is a row
that is being written, or was torn by a kill, and is left out. Any other line that is no JSON object is an error.
"""

import json
from pathlib import Path
from typing import Any

from groundup.errors import UserError

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of `path`, none where there is no file. Raises UserError naming the first line that is damaged."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; remove that line")
        if not isinstance(row.get("step"), (int, float)):
            raise UserError(f'{path}: line {number} has no number "step"; every row of metrics.jsonl needs one')
        rows.append(row)
    return rows
