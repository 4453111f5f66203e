"""`groundup tokenizer train`: learn a vocabulary from text."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from groundup.cli.output import check_utf8, note
from groundup.cli.parse import parse
from groundup.cli.progress_line import ProgressLine
from groundup.errors import UserError
from groundup.files import check_replaceable

FILES = frozenset({"tokenizer.json", "vocab.json", "merges.txt"})


@dataclass(frozen=True, kw_only=True)
class Args:
    """Learn a byte-level BPE vocabulary from text files or folders of them."""

    inputs: Annotated[tuple[Path, ...], Positional, arg(metavar="FILES...", help_behavior_hint="")]
    """Text files (UTF-8; also .jsonl; .gz, .xz, .zst of either), or folders of them."""
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
    text_field: str = "text"
    """Field of a .jsonl line that holds its text."""
    pattern: str = "gpt2"
    """What cuts text into pre-tokens: gpt2, cl100k, llama3, or a regular expression (slower)."""
    ties: Literal["greatest", "huggingface"] = "greatest"
    """Which of equally frequent pairs is merged first: the greatest pair of byte strings, or as tokenizers does."""
    memory: str = "0"
    """Bound on the memory that training allocates, such as 2GiB or 500MB; 0: none."""
    prune: bool = False
    """At the bound, drop the rarest words (counts become approximate) instead of stopping."""


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str, name: str) -> int:
    """A number of bytes, with or without a unit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise UserError(f"{name} {text!r} is not a size; give a number and a unit, such as 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    for token in args.special_token:
        check_utf8(token, "--special-token")
    check_replaceable(args.out, FILES, "tokenizer train")
    memory = parse_bytes(args.memory, "--memory")
    from groundup.tokenizer import Tokenizer

    with ProgressLine() as progress:
        tokenizer = Tokenizer.train(
            args.inputs,
            vocab_size=args.vocab_size,
            special_tokens=args.special_token or ("<|endoftext|>",),
            threads=args.threads,
            errors=args.errors,
            text_field=args.text_field,
            pattern=args.pattern,
            ties=args.ties,
            memory=memory,
            prune=args.prune,
            progress=progress,
        )
    tokenizer.save(args.out)
    note(f"{args.out}: {tokenizer.vocab_size} ids, {len(tokenizer.merges)} merges")
    return 0
