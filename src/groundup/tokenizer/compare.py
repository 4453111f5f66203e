"""Two or more tokenizers on the same texts: bytes a token, and how fast each encodes.

Speed is that of a first pass, on one thread: the tokenizer is loaded anew for each file, as a second pass over the same
text finds its words in the cache and would flatter. Reading the file is not counted.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groundup.tokenizer.info import texts
from groundup.tokenizer.tokenizer import Tokenizer


def compare(paths: Sequence[Path], files: Sequence[Path]) -> list[dict[str, Any]]:
    """One row a file, and one for all files together, with a cell for each tokenizer in the order of `paths`."""
    rows: list[dict[str, Any]] = []
    for file in files:
        found = [b"".join(text) for text in texts(file)]
        cells = [_measure(path, found) for path in paths]
        rows.append({"file": file.name, "bytes": sum(map(len, found)), "cells": cells})
    if len(rows) > 1:
        rows.append(_total(rows))
    return rows


def _measure(path: Path, found: Sequence[bytes]) -> dict[str, Any]:
    tokenizer = Tokenizer.load(path)
    tokenizer.encode_numpy("")  # imports numpy
    start = time.perf_counter()
    tokens = sum(len(tokenizer.encode_numpy(text)) for text in found)
    return _cell(sum(map(len, found)), tokens, time.perf_counter() - start)


def _cell(size: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "bytes_per_token": size / tokens,
        "seconds": seconds,
        "mb_per_second": size / 1e6 / seconds,
    }


def _total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    size = sum(row["bytes"] for row in rows)
    sums = [
        _cell(size, sum(cell["tokens"] for cell in column), sum(cell["seconds"] for cell in column))
        for column in zip(*(row["cells"] for row in rows), strict=True)
    ]
    return {"file": "all", "bytes": size, "cells": sums}
