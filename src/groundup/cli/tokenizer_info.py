"""`groundup tokenizer info`: what a tokenizer holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from groundup.cli.output import check_utf8, show
from groundup.cli.parse import parse
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Size, longest tokens, the merges of a word, and how far a tokenizer compresses a text."""

    tokenizer: Annotated[Path, Positional, arg(metavar="DIR")]
    """Directory written by `groundup tokenizer train`, or a tokenizer file."""
    longest: int = 10
    """How many of the longest tokens to list."""
    word: str = ""
    """A word (or any text): show the tree of merges of each of its tokens. A word within a text begins with a space."""
    text: Path | None = None
    """A text file: show the bytes a token."""
    json: str = ""
    """File for the result as JSON; without a path, standard output holds only that."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    if args.longest < 0:
        raise UserError(f"--longest is {args.longest}; it must not be negative")
    check_utf8(args.word, "--word")
    from groundup.tokenizer import Tokenizer
    from groundup.tokenizer.info import describe, draw, merge_trees

    tokenizer = Tokenizer.load(args.tokenizer)
    found = describe(tokenizer, args.longest, args.word, args.text)
    specials = [f"{name} ({number})" for name, number in found["special_tokens"].items()]
    rows = {
        "ids": f"{found['vocab_size']:,}",
        "merges": f"{found['merges']:,}",
        "special tokens": ", ".join(specials) or "none",
        "pattern": found["pattern"],
        "fingerprint": found["fingerprint"],
        "bytes in a token": f"{found['mean_token_bytes']:.2f} on average over the vocabulary",
    }
    for place, token in enumerate(found["longest"]):
        rows["longest tokens" if place == 0 else " " * place] = (
            f'{token["bytes"]:>5} bytes  id {token["id"]:<7} "{token["token"]}"'
        )
    if args.text is not None:
        text = found["text"]
        rows["text"] = (
            f"{text['bytes_per_token']:.3f} bytes a token: {text['bytes']:,} bytes, {text['tokens']:,} tokens"
        )
    show(found, rows, args.json)
    if args.json != "-" and args.word:
        for node in merge_trees(tokenizer, args.word):
            print("\n" + "\n".join(draw(node)))
    return 0
