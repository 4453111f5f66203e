"""`groundup tokenizer decode`: ids on standard input to text."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from tyro.conf import Positional, arg

from groundup.cli.parse import parse
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Text of the ids on standard input, as they arrive, byte for byte."""

    tokenizer: Annotated[Path, Positional, arg(metavar="DIR")]
    """Directory written by `groundup tokenizer train`, or a tokenizer file."""
    numpy: Path | None = None
    """Read the ids from this .npy file (such as a token directory's train.npy) instead of standard input."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.tokenizer)
    out = sys.stdout.buffer
    for ids in _from_text(sys.stdin.buffer) if args.numpy is None else _from_numpy(args.numpy):
        out.write(tokenizer.decode_bytes(ids))
        out.flush()
    return 0


def _from_text(file: BinaryIO) -> Iterator[list[int]]:
    """The numbers of each line, parted by spaces, or by commas and in brackets as Python prints lists."""
    for number, line in enumerate(file, 1):
        ids: list[int] = []
        for word in line.translate(bytes.maketrans(b"[],", b"   ")).split():
            try:
                ids.append(int(word))
            except ValueError:
                text = word[:20].decode(errors="replace")
                raise UserError(f"standard input: line {number} holds {text!r}, which is no id; give numbers") from None
        yield ids


def _from_numpy(path: Path) -> Iterator[list[int]]:
    import numpy as np

    try:
        ids = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a .npy file ({error})") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{path}: holds {ids.dtype} of shape {ids.shape}; ids are whole numbers in one row")
    for start in range(0, len(ids), 1 << 16):
        yield ids[start : start + (1 << 16)].tolist()
