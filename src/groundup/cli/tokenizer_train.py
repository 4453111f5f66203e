"""`groundup tokenizer train`: learn a vocabulary from text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from groundup.cli.output import check_replaceable, check_utf8, note
from groundup.cli.parse import parse
from groundup.errors import UserError

FILES = frozenset({"tokenizer.json", "vocab.json", "merges.txt"})


@dataclass(frozen=True, kw_only=True)
class Args:
    """Learn a byte-level BPE vocabulary from text files or folders of them."""

    inputs: Annotated[tuple[Path, ...], Positional, arg(metavar="FILES...", help_behavior_hint="")]
    """Text files (UTF-8), or folders of them."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Directory for tokenizer.json, vocab.json and merges.txt; one of this command's making is replaced."""
    vocab_size: int = 10_000
    """Ids in all: 256 bytes + merges + special tokens."""
    special_token: UseAppendAction[tuple[str, ...]] = ()
    """A text that always becomes one id and that merges never cross; repeatable. None given: <|endoftext|>."""
    threads: int = 0
    """Threads; 0: one a core."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8. strict: stop and name the byte; replace: put U+FFFD in its place and count."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    if not args.inputs:
        raise UserError(f"missing: FILES..., at least one text file or folder; see {prog} --help")
    for token in args.special_token:
        check_utf8(token, "--special-token")
    check_replaceable(args.out, FILES, "tokenizer train")
    from groundup.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(
        args.inputs,
        vocab_size=args.vocab_size,
        special_tokens=args.special_token or ("<|endoftext|>",),
        threads=args.threads,
        errors=args.errors,
    )
    tokenizer.save(args.out)
    note(f"{args.out}: {tokenizer.vocab_size} ids, {len(tokenizer.merges)} merges")
    return 0
