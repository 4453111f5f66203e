"""`groundup tokenizer compare`: tokenizers side by side on the same texts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from groundup.cli.output import emit
from groundup.cli.parse import parse
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Bytes a token and encoding speed of two or more tokenizers, text by text (say, one for each language)."""

    tokenizers: Annotated[tuple[Path, ...], Positional, arg(metavar="DIR...", help_behavior_hint="")]
    """Directories written by `groundup tokenizer train`, or tokenizer files."""
    text: UseAppendAction[tuple[Path, ...]] = ()
    """A text file; repeatable."""
    json: str = ""
    """File for the rows as JSON; without a path, standard output holds only that."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    if len(args.tokenizers) < 2 or not args.text:
        raise UserError(f"give two or more tokenizers, and at least one --text FILE; see {prog} --help")
    from tabulate import tabulate

    from groundup.tokenizer.compare import compare

    rows = compare(args.tokenizers, args.text)
    names = _distinct([str(path) for path in args.tokenizers])
    headers = ["text", "MB", *(f"{name}\n{unit}" for unit in ("bytes a token", "MB/s") for name in names)]
    table = [
        [row["file"], row["bytes"] / 1e6]
        + [cell["bytes_per_token"] for cell in row["cells"]]
        + [cell["mb_per_second"] for cell in row["cells"]]
        for row in rows
    ]
    formats = ("", ".2f", *[".3f"] * len(names), *[".1f"] * len(names))
    result = {"tokenizers": [path.name for path in args.tokenizers], "rows": rows}
    emit(result, tabulate(table, headers, floatfmt=formats), args.json)
    return 0


def _distinct(paths: list[str]) -> list[str]:
    """Last parts of the paths, where these tell them apart."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else paths
