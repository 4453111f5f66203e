"""Training: files → word counts → merges, in the Rust core, with errors a user understands.

Two phases. "count" reads the text (memory-mapped, all threads), cuts it at special tokens and into pre-tokens, and
counts each distinct one; "merge" runs the merge loop over the counted words. Memory: the table of distinct words.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from groundup import _core
from groundup.errors import UserError

Progress = Callable[[str, int, int], None]
"""Called about ten times a second with (phase, done, total): bytes while "count", merges while "merge"."""

Merges = list[tuple[bytes, bytes]]


def available_threads(threads: int) -> int:
    """`threads`, or with 0 the number of cores that this process may use."""
    if threads < 0:
        raise UserError(f"threads is {threads}: give a positive number, or 0 for all cores")
    return threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def merges_wanted(vocab_size: int, special_tokens: Sequence[str]) -> int:
    """Number of merges that fill a vocabulary of 256 bytes and the special tokens."""
    check_special_tokens(special_tokens)
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens "
            f"need at least {least}"
        )
    return vocab_size - least


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """Special tokens are distinct, not empty and well-formed text."""
    if isinstance(special_tokens, str):
        raise UserError(f"special_tokens is the text {special_tokens!r}: give a list, [{special_tokens!r}]")
    for name in special_tokens:
        if not name:
            raise UserError("a special token is empty: leave it out")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"special token {name!r} holds a lone surrogate: it is no text") from error
    if len(set(special_tokens)) < len(special_tokens):
        twice = next(name for name in special_tokens if list(special_tokens).count(name) > 1)
        raise UserError(f"special token {twice!r} is given twice: leave one out")


def text_files(inputs: Iterable[str | os.PathLike]) -> list[Path]:
    """The files named by `inputs`; a folder stands for all files below it, in sorted order."""
    if isinstance(inputs, (str, bytes, os.PathLike)):
        raise UserError(f"inputs is the single path {os.fspath(inputs)!r}: give a list of paths")
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not found:
                raise UserError(f"{path}: the folder holds no files")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    if not files:
        raise UserError("no input: give at least one text file or folder")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{files[0]}: the file is empty; there is nothing to train on")
    return files


def train_merges(
    inputs: Iterable[str | os.PathLike],
    wanted: int,
    special_tokens: Sequence[str],
    threads: int,
    errors: str,
    progress: Progress | None,
) -> tuple[Merges, int]:
    """The merges, and the number of ill-formed UTF-8 sequences that were replaced (`errors="replace"`)."""
    if errors not in ("strict", "replace"):
        raise UserError(f'errors is {errors!r}: give "strict" or "replace"')
    files = text_files(inputs)
    counter = _core.WordCounter([name.encode() for name in special_tokens], errors == "replace")
    total = sum(file.stat().st_size for file in files)
    try:
        counter.count_files(files, available_threads(threads), total, progress)
    except UnicodeDecodeError as error:
        path = files[int(error.object)]
        raise UserError(
            f"{path}: invalid UTF-8 at byte {error.start}; mend the file, or replace such bytes with errors=replace"
        ) from error
    except OSError as error:
        raise UserError(f"{error}; check the path and its permissions") from error
    return counter.train(wanted, progress), counter.totals()[2]
