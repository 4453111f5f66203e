"""`groundup tokenizer encode`: standard input to ids."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from tyro.conf import Positional, arg

from groundup.cli.output import note
from groundup.cli.parse import parse
from groundup.files import file_written_aside

BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Args:
    """Ids of the text on standard input, as it arrives; a new line after each token that ends a line of the text."""

    tokenizer: Annotated[Path, Positional, arg(metavar="DIR")]
    """Directory written by `groundup tokenizer train`, or a tokenizer file."""
    numpy: Path | None = None
    """Write the ids to this .npy file (uint16 or uint32) instead of standard output."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.tokenizer)
    ids = tokenizer.encode_iterable(_blocks(sys.stdin.buffer))
    if args.numpy is not None:
        note(f"{args.numpy}: {_to_numpy(ids, tokenizer, args.numpy):,} tokens")
        return 0
    ends_line = {number for number, token in tokenizer.vocab.items() if b"\n" in token}
    row: list[str] = []
    for number in ids:
        row.append(str(number))
        if number in ends_line:
            print(" ".join(row))
            row.clear()
    if row:
        print(" ".join(row))
    return 0


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """What has arrived, without waiting for more; the ids of what came before are out by then."""
    read = getattr(file, "read1", file.read)
    while block := read(BLOCK_BYTES):
        yield block
        sys.stdout.flush()


def _to_numpy(ids: Iterator[int], tokenizer, path: Path) -> int:
    from itertools import islice

    import numpy as np

    from groundup.data.dataset import token_dtype
    from groundup.data.npy import NpyWriter

    with file_written_aside(path) as aside, NpyWriter(aside, token_dtype(tokenizer.vocab_size)) as writer:
        while chunk := list(islice(ids, 1 << 16)):
            writer.append(np.array(chunk))
    return writer.count
