"""`groundup tokenizer profile`: where training spends time and memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from groundup.cli.output import emit
from groundup.cli.parse import parse
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train on text and report time and memory by phase, or by function for the pure-Python ladder."""

    inputs: Annotated[tuple[Path, ...], Positional, arg(metavar="FILES...", help_behavior_hint="")]
    """Text files (UTF-8), or folders of them."""
    vocab_size: int = 10_000
    """Ids in all: 256 bytes + merges + special tokens."""
    special_token: UseAppendAction[tuple[str, ...]] = ()
    """A special token; repeatable. None given: <|endoftext|>."""
    threads: int = 0
    """Threads, or processes of the ladder; 0: one a core."""
    ladder: Literal["none", "naive", "incremental", "parallel", "streaming"] = "none"
    """Profile this step of the pure-Python ladder with cProfile, its worker processes included."""
    top: int = 20
    """With --ladder: how many functions to list."""
    json: str = ""
    """File for the rows as JSON; without a path, standard output holds only that."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    if args.top < 1:
        raise UserError(f"--top is {args.top}; it must be at least 1")
    from tabulate import tabulate

    from groundup.tokenizer.profile import profile_core, profile_ladder

    specials = args.special_token or ("<|endoftext|>",)
    if args.ladder == "none":
        rows, _ = profile_core(args.inputs, args.vocab_size, specials, args.threads)
        table = [
            [row["phase"], f"{row['seconds']:.3f} s", f"{row['peak_bytes'] / 2**20:,.0f} MiB", _rate(row)]
            for row in rows
        ]
        headers = ["phase", "time", "peak memory", "rate"]
    else:
        rows = profile_ladder(args.ladder, args.inputs, args.vocab_size, specials, args.threads, args.top)
        table = [
            [row["function"], row["calls"], f"{row['own_seconds']:.3f}", f"{row['cumulative_seconds']:.3f}"]
            for row in rows
        ]
        headers = ["function", "calls", "own s", "with callees s"]
    result = {"ladder": args.ladder, "vocab_size": args.vocab_size, "rows": rows}
    emit(result, tabulate(table, headers, disable_numparse=True), args.json)
    return 0


def _rate(row: dict) -> str:
    if row["phase"] == "count":
        return f"{row['rate'] / 1e6:,.1f} MB/s"
    return f"{row['rate']:,.0f} merges/s" if row["phase"] == "merge" else ""
