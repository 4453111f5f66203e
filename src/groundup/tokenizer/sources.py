"""Where text comes from: paths, folders, compressed files, JSON lines.

A plain text file is left to the core, which maps it into memory. What must be unpacked or parsed first is read as
a stream of blocks, so the memory used does not depend on its size.
"""

import codecs
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from groundup.errors import UserError, optional_package

BLOCK = 1 << 20

_PACKED = {".gz", ".xz", ".zst", ".zstd"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_MEND = "mend the file, or replace such places with errors=replace"


class Source(NamedTuple):
    """An input as the user named it: the basename, its files in reading order, their bytes."""

    name: str
    files: list[Path]
    bytes: int

    def meta(self) -> dict[str, str | int]:
        """What a token directory remembers of it."""
        return {"name": self.name, "files": len(self.files), "bytes": self.bytes}


def find_sources(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Source]:
    """The files behind `paths`; a folder stands for all files in it, in the order of their names.

    Hidden files and folders, and empty files inside a folder, are left out. Raises UserError for a path that does
    not exist, cannot be read, is an empty file, or is a folder without text.
    """
    sources = []
    for path in map(Path, [paths] if isinstance(paths, (str, os.PathLike)) else paths):
        if path.is_dir():
            files = [file for file in _walk(path) if file.stat().st_size]
            if not files:
                raise UserError(f"{path}: the folder holds no text files; name a file or a folder with text")
        elif path.is_file():
            files = [path]
            if not path.stat().st_size:
                raise UserError(f"{path}: the file is empty; name a file with text")
        elif path.exists():
            raise UserError(f"{path}: neither a regular file nor a folder; write the text to a file first")
        else:
            raise UserError(f"{path}: no such file or folder; check the path")
        sources.append(Source(path.name or path.resolve().name, files, sum(file.stat().st_size for file in files)))
    if not sources:
        raise UserError("no input given; name at least one text file or folder")
    return sources


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files under `folder`, depth first, names sorted, hidden ones left out."""

    def refuse(error: OSError) -> None:  # os.walk would leave the folder out and say nothing
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check the folder")

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def text_files(inputs: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    """The files of `find_sources`, in one list."""
    return [file for source in find_sources(inputs) for file in source.files]


def is_plain(path: Path) -> bool:
    """Whether the file is text as it stands."""
    return path.suffix not in _PACKED and not is_json_lines(path)


def is_json_lines(path: Path) -> bool:
    """Whether the file, unpacked, holds a JSON object a line."""
    name = path.with_suffix("") if path.suffix in _PACKED else path
    return name.suffix in (".jsonl", ".ndjson")


@contextmanager
def unpacked(file: BinaryIO, path: Path) -> Generator[BinaryIO]:
    """The open file's content, unpacked as its name says. UserError where that fails, inside the block too."""
    try:
        if path.suffix == ".gz":
            yield gzip.open(file)  # noqa: SIM115  # pyrefly: ignore[invalid-yield] (a file in all but its class)
        elif path.suffix == ".xz":
            yield lzma.open(file)  # noqa: SIM115  # pyrefly: ignore[invalid-yield]
        elif path.suffix in (".zst", ".zstd"):
            zstandard = optional_package("zstandard", f"{path}: reading zstd")
            yield io.BufferedReader(_ZstdFrames(file, zstandard), BLOCK)  # pyrefly: ignore[invalid-yield]
        else:
            yield file
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be unpacked ({error})") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise UserError(f"{path}: cannot be unpacked ({error})") from error


class _ZstdFrames(io.RawIOBase):
    """The content of one frame after another. zstandard's own reader does not notice when the last one is cut off."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file = file
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(1 << 16)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            frame = self._frame or self._new_frame()
            self._ready = memoryview(frame.decompress(packed))
            self._packed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


@dataclass
class JsonLines:
    """Reads the text of JSON lines: the string in the field `field` of each.

    errors: "replace" puts U+FFFD in the place of invalid UTF-8 and of lone surrogates; `replaced` counts them.
    """

    path: Path
    field: str = "text"
    errors: str = "strict"
    replaced: int = 0

    def texts(self, stream: Iterable[bytes]) -> Iterator[str]:
        """The text of each line that is not blank."""
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield self._text(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number)

    def _text(self, line: bytes, number: int) -> str:
        where = f"{self.path}: line {number}"
        try:
            decoded = line.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not valid UTF-8 at its byte {error.start}; {_MEND}") from None
        try:
            text = json.loads(decoded)[self.field]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(f'{where} is not a JSON object with a string in the field "{self.field}"')
        if self.errors == "replace":
            self.replaced += decoded.count("\ufffd") - line.count(b"\xef\xbf\xbd")
        if not _SURROGATE.search(text):
            return text
        if self.errors != "replace":
            raise UserError(f"{where} holds a lone surrogate, which is no text; {_MEND}")
        text, count = _SURROGATE.subn("\ufffd", text)
        self.replaced += count
        return text


def blocks(
    path: Path, read_bytes: Callable[[int], None], lines: JsonLines | None = None
) -> Iterator[tuple[bytes | str, bool]]:
    """(block of text, does a document end here) of a file, unpacked. UserError where it cannot be read.

    `read_bytes` is told how far the file on disk has been read. `lines`: how JSON lines are read.
    """
    for text, ends, at in _blocks(path, lines or JsonLines(path)):
        read_bytes(at)  # out here, where its errors are not taken for the file's
        yield text, ends


def _blocks(path: Path, lines: JsonLines) -> Iterator[tuple[bytes | str, bool, int]]:
    try:
        with open(path, "rb") as file, unpacked(file, path) as stream:
            if is_json_lines(path):
                for text in lines.texts(stream):
                    yield text, True, file.tell()
                return
            while block := stream.read(BLOCK):
                yield block, False, file.tell()
            yield b"", True, file.tell()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
