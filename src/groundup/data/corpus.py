"""Text files and folders as a stream of documents.

A document ends at `<|endoftext|>` or at the end of its file. Files are read in blocks, decoded as UTF-8 and cut at
the separators; a character or a separator that straddles two blocks is put together first. What is only white
space between two separators is no document (`empty` counts it), so neither a newline after the last separator nor
two separators in a row make one.

Memory is bounded by the block and the piece, not by the document: a document longer than `piece_chars` comes in
several pieces, each cut where the tokenizer's pattern has a boundary: after a letter or a digit and before a space or
a newline. (GPT-2's pattern lets a pre-token start with white space, never go from a letter or digit to white space;
cl100k's and o200k's neither: they take newlines only after punctuation.) So the ids of the pieces,
one after another, are the ids of the document. Only text with no such place, such as one enormous word, is held
whole.

Files ending in .gz, .xz and .zst are unpacked as they are read. In .jsonl files, packed or not, each line is an object
whose text field holds a document.

Cost: one pass; each character is decoded once, and searched once for the separator.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from groundup.errors import UserError
from groundup.tokenizer import END_OF_TEXT as SEPARATOR
from groundup.tokenizer.sources import JsonLines, is_json_lines, unpacked

BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 20

_SAFE_CUT = re.compile(r"[^\W_](?=[ \n])")
_ERRORS = ("strict", "replace")


class Piece(NamedTuple):
    """Text of one document; `ends` says that the document is complete with it."""

    text: str
    ends: bool


class Source(NamedTuple):
    """An input as the user named it: the basename, its files in reading order, their bytes."""

    name: str
    files: list[Path]
    bytes: int


@dataclass
class ReadCounts:
    """What reading met; the readers below add to it as they go."""

    bytes: int = 0
    """Bytes read from the files."""
    replaced: int = 0
    """Invalid UTF-8 sequences replaced by U+FFFD (`errors="replace"`)."""
    empty: int = 0
    """Stretches between separators without text."""


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
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def documents(
    paths: str | os.PathLike | Iterable[str | os.PathLike], *, errors: str = "strict", text_field: str = "text"
) -> Iterator[str]:
    """Every document of the files and folders `paths`, whole, without its separator.

    errors: "strict" raises UserError at the first byte that is not UTF-8; "replace" puts U+FFFD in its place.
    text_field: the field of a JSON line that holds its text.
    """
    held: list[str] = []
    files = [file for source in find_sources(paths) for file in source.files]
    for piece in read_pieces(files, errors=errors, text_field=text_field):
        held.append(piece.text)
        if piece.ends:
            yield "".join(held)
            held.clear()


def read_pieces(
    files: Sequence[Path],
    *,
    errors: str = "strict",
    counts: ReadCounts | None = None,
    block_bytes: int = BLOCK_BYTES,
    piece_chars: int = PIECE_CHARS,
    text_field: str = "text",
) -> Iterator[Piece]:
    """The documents of `files` in order, the long ones in several pieces (see the module's docstring).

    Pieces have up to about piece_chars + block_bytes characters where the text has a place to cut.
    """
    if errors not in _ERRORS:
        raise UserError(f'errors is "{errors}"; it must be "strict" or "replace"')
    counts = ReadCounts() if counts is None else counts
    for path in files:
        try:
            with open(path, "rb") as file, unpacked(file, path) as stream:
                before = counts.bytes
                if is_json_lines(path):
                    texts = _records(stream, JsonLines(path, text_field, errors), counts)
                else:
                    texts = iter([_decode(stream, path, errors, counts, block_bytes)])
                for document in texts:
                    for piece in _cut(document, counts, piece_chars):
                        counts.bytes = before + file.tell()
                        yield piece
                counts.bytes = before + file.tell()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check the file") from error


def _records(stream: BinaryIO, lines: JsonLines, counts: ReadCounts) -> Iterator[Iterator[str]]:
    """The text of each JSON line, as a text of its own."""
    for text in lines.texts(stream):
        counts.replaced += lines.replaced
        lines.replaced = 0
        yield iter([text])


def _decode(file: BinaryIO, path: Path, errors: str, counts: ReadCounts, block_bytes: int) -> Iterator[str]:
    """The file's text block by block; the bytes of an unfinished character wait for the next block."""
    rest = b""
    position = 0  # of rest's first byte in the file
    while True:
        block = file.read(block_bytes)
        data = rest + block
        try:
            text, used = codecs.utf_8_decode(data, errors, not block)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: invalid UTF-8 at byte {position + error.start} (0x{data[error.start]:02x}); "
                "convert the file to UTF-8, or go on past such bytes with --errors replace"
            ) from None
        if errors == "replace":  # a U+FFFD that the file itself holds is no replacement
            counts.replaced += text.count("\ufffd") - data[:used].count(b"\xef\xbf\xbd")
        rest = data[used:]
        position += used
        if text:
            yield text
        if not block:
            return


def _cut(texts: Iterator[str], counts: ReadCounts, piece_chars: int) -> Iterator[Piece]:
    """One file's text, cut into documents at the separators and into pieces where a document is long."""
    buffer = ""
    searched = 0  # no separator starts before this index of the buffer
    tried = 0  # no place to cut before this one
    inside = False  # a piece of the buffer's document has been given out
    for text in texts:
        buffer += text
        start = 0
        while (end := buffer.find(SEPARATOR, searched)) >= 0:
            document = buffer[start:end]
            if inside or (document and not document.isspace()):
                yield Piece(document, True)
            else:
                counts.empty += 1
            start = searched = end + len(SEPARATOR)
            tried, inside = 0, False
        buffer = buffer[start:]
        while len(buffer) > piece_chars:
            place = _SAFE_CUT.search(buffer, max(piece_chars, tried))
            if place is None:
                tried = len(buffer) - 1
                break
            yield Piece(buffer[: place.end()], False)
            buffer, tried, inside = buffer[place.end() :], 0, True
        searched = max(0, len(buffer) - len(SEPARATOR) + 1)
    if inside or (buffer and not buffer.isspace()):
        yield Piece(buffer, True)
    elif buffer:
        counts.empty += 1
