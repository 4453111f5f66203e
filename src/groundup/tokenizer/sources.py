"""Where training text comes from: paths, folders, compressed files, JSON lines.

A plain text file is left to the core, which maps it into memory. What must be unpacked or parsed first is read as
a stream of blocks, so the memory used does not depend on its size.
"""

import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from groundup.errors import UserError

BLOCK = 1 << 20

_PACKED = {".gz", ".xz", ".zst", ".zstd"}


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


def is_plain(path: Path) -> bool:
    """Whether the file is text as it stands."""
    return path.suffix not in _PACKED and _inner_suffix(path) != ".jsonl"


def _inner_suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix


def blocks(path: Path, read_bytes: Callable[[int], None]) -> Iterator[tuple[bytes, bool]]:
    """(block of text, does a document end here) of a packed file or one of JSON lines.

    `read_bytes` is told how far the file on disk has been read.
    """
    with open(path, "rb") as file:
        try:
            with _unpacked(file, path) as stream:
                if _inner_suffix(path) == ".jsonl":
                    for number, line in enumerate(stream, 1):
                        if line.strip():
                            yield _text_of(line, path, number), True
                        read_bytes(file.tell())
                    return
                while block := stream.read(BLOCK):
                    read_bytes(file.tell())
                    yield block, False
                yield b"", True
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: cannot be unpacked ({error})") from error


def _unpacked(file: IO[bytes], path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix == ".xz":
        return lzma.open(file)
    if path.suffix in (".zst", ".zstd"):
        try:
            zstandard = import_module("zstandard")  # optional, so unknown to the type checker
        except ImportError as error:
            raise UserError(f"{path}: reading zstd needs the package zstandard (pip install zstandard)") from error
        return zstandard.ZstdDecompressor().stream_reader(file)
    return file


def _text_of(line: bytes, path: Path, number: int) -> bytes:
    """The field "text" of a JSON line, as UTF-8."""
    try:
        return json.loads(line)["text"].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path}: line {number} is not a JSON object with a text field "text"') from error
