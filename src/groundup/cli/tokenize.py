"""`groundup tokenize`: text into token files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import note
from groundup.cli.parse import parse
from groundup.cli.progress_line import ProgressLine


@dataclass(frozen=True, kw_only=True)
class Args:
    """Turn text into token files: train.npy, valid.npy, where their documents start, and meta.json."""

    train: Annotated[Path, Positional, arg(metavar="TRAIN")]
    """Text to train on: a file or a folder. Also .jsonl; .gz, .xz, .zst of either."""
    valid: Annotated[Path | None, Positional, arg(metavar="[VALID]", help_behavior_hint="")] = None
    """Text to validate on; left out, a part of TRAIN is set aside."""
    tokenizer: Annotated[Path, arg(metavar="DIR")]
    """Directory written by `groundup tokenizer train`, or a tokenizer.json."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Directory to write; one of this command's making is replaced."""
    valid_fraction: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0.01)")] = None
    """Without VALID: the part of TRAIN's documents set aside for validation."""
    threads: int = 0
    """Threads; 0: one a core."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8. strict: stop and name the byte; replace: put U+FFFD in its place and count."""
    text_field: str = "text"
    """Field of a .jsonl line that holds its text."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.data import tokenize_corpus
    from groundup.tokenizer import Tokenizer

    with ProgressLine() as progress:
        meta = tokenize_corpus(
            [args.train],
            None if args.valid is None else [args.valid],
            Tokenizer.load(args.tokenizer),
            args.out,
            valid_fraction=args.valid_fraction,
            threads=args.threads,
            errors=args.errors,
            progress=progress,
            text_field=args.text_field,
        )
    if meta["replaced"]:
        note(f"{meta['replaced']:,} invalid UTF-8 sequences replaced by U+FFFD")
    for split, counts in meta["splits"].items():
        print(
            f"{args.out / split}.npy: {counts['tokens']:,} tokens in {counts['documents']:,} documents, "
            f"{counts['bytes'] / counts['tokens']:.2f} bytes a token"
        )
    return 0
