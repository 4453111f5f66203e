"""What commands share when they write: a card for people, JSON for machines."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundup.errors import UserError
from groundup.files import write_atomic


def emit(result: Mapping[str, Any], text: str, json_path: str, ensure_ascii: bool = True) -> None:
    """Print the text; `json_path` "-" prints `result` as JSON in its place, another path gets it as well."""
    document = json.dumps(result, indent=2, ensure_ascii=ensure_ascii)
    print(document if json_path == "-" else text)
    if json_path not in ("", "-"):
        write_atomic(Path(json_path), document + "\n")


def show(result: Mapping[str, Any], rows: Mapping[str, str], json_path: str) -> None:
    """`emit` with a card as the text: name and value in two columns."""
    width = max(map(len, rows))
    emit(result, "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), json_path)


def note(message: str) -> None:
    """One line on standard error: what was derived or happened, beside the command's result."""
    print(message, file=sys.stderr, flush=True)


def check_utf8(text: str, what: str) -> None:
    """Refuse command-line text that is not UTF-8 (Python hands its odd bytes on as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode())
        raise UserError(f"{what} is not valid UTF-8 at byte {offset}") from None
