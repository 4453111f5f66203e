"""Text files and folders as a stream of documents.

A document ends at `<|endoftext|>` or at the end of its file. What is only white space between two separators is no
document (`empty` counts it), so neither a newline after the last separator nor two separators in a row make one.

Files come in blocks of about a megabyte of bytes, each ending behind a separator, so that whoever reads them does
little and threads may do the rest: look for invalid UTF-8, split, encode. Memory is bounded by the block, not by the
document: one longer than `piece_bytes` is cut where the tokenizer's pattern has a boundary: after a letter or a
digit and before a space or a newline. (GPT-2's pattern lets a pre-token start with white space, never go from a letter
or digit to white space; cl100k's and o200k's neither: they take newlines only after punctuation.) So the ids of the
pieces, one after another, are the ids of the document. Only text with no such place, such as one enormous word, is
held whole.

Files ending in .gz, .xz and .zst are unpacked as they are read. In .jsonl files, packed or not, each line is an object
whose text field holds a document.

Cost: reading copies the bytes and looks for one separator a block; the rest is C loops over a block.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer import END_OF_TEXT as SEPARATOR
from groundup.tokenizer.sources import JsonLines, is_json_lines, text_files, unpacked

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 1 << 20

_SEPARATOR = SEPARATOR.encode()
_MAYBE_CUT = re.compile(rb"[0-9A-Za-z\x80-\xff](?=[ \n])")
_LAST_CHARACTER = re.compile(rb"[\x00-\x7f\xc2-\xf4][\x80-\xbf]*\Z")
# What is no white space, seen from its first byte; of the others some are.
_INK = re.compile(rb"[\s\x1c-\x1f]*+[^\s\x1c-\x1f\xc2\xe1-\xe3]")
_ERRORS = ("strict", "replace")


@dataclass
class ReadCounts:
    """What reading met; readers add to it as they go."""

    bytes: int = 0
    """Bytes read from the files."""
    replaced: int = 0
    """Invalid UTF-8 sequences replaced by U+FFFD (`errors="replace"`); `read_blocks` knows those in JSON lines."""
    empty: int = 0
    """Stretches between separators without text."""


class Documents(NamedTuple):
    """The documents of a block."""

    texts: list[bytes]
    unfinished: bool
    """It goes on in the next block, and is the only one in this."""
    empty: int
    """Stretches between separators without text."""
    replaced: int
    """Invalid UTF-8 sequences replaced by U+FFFD."""


class Block(NamedTuple):
    """Bytes of a text, up to the end of a document, of the text or of a piece."""

    text: bytes
    path: Path
    offset: int
    """Of the first byte in the (unpacked) file."""
    inside: bool
    """It begins inside a document that has text already."""
    ends: bool
    """The text ends with it, and with the text the last document."""

    def documents(self, errors: str) -> Documents:
        """The documents in UTF-8. errors: "strict" raises UserError at a byte that is not, "replace" replaces it."""
        (*texts, rest), replaced = self._parts(errors)
        if self.ends and (rest or (self.inside and not texts)):
            texts.append(rest)
        unfinished = bool(rest) and not self.ends  # blocks are cut behind a separator, or where they hold none
        begun = texts[:1] if self.inside else []
        fresh = [text for text in texts[len(begun) :] if _INK.match(text) or not (text.decode() or " ").isspace()]
        empty = len(texts) - len(begun) - len(fresh)
        return Documents([*begun, *fresh, *([rest] if unfinished else [])], unfinished, empty, replaced)

    def _parts(self, errors: str) -> tuple[list[bytes], int]:
        """What stands between the separators, and how many invalid sequences were replaced."""
        try:
            return _core.split_text(self.text, _SEPARATOR), 0
        except UnicodeDecodeError as error:
            if errors == "strict":
                raise UserError(
                    f"{self.path}: invalid UTF-8 at byte {self.offset + error.start} (0x{self.text[error.start]:02x}); "
                    "convert the file to UTF-8, or go on past such bytes with --errors replace"
                ) from None
        data = self.text.decode(errors="replace").encode()
        mark = "\ufffd".encode()  # one that the file itself holds is no replacement
        return data.split(_SEPARATOR), data.count(mark) - self.text.count(mark)


def documents(
    paths: str | os.PathLike | Iterable[str | os.PathLike], *, errors: str = "strict", text_field: str = "text"
) -> Iterator[str]:
    """Every document of the files and folders `paths`, whole, without its separator.

    errors: "strict" raises UserError at the first byte that is not UTF-8; "replace" puts U+FFFD in its place.
    text_field: the field of a JSON line that holds its text.
    """
    for block in read_blocks(text_files(paths), errors=errors, piece_bytes=1 << 62, text_field=text_field):
        for text in block.documents(errors).texts:
            yield text.decode()


def read_blocks(
    files: Sequence[Path],
    *,
    errors: str = "strict",
    counts: ReadCounts | None = None,
    block_bytes: int = BLOCK_BYTES,
    piece_bytes: int = PIECE_BYTES,
    text_field: str = "text",
) -> Iterator[Block]:
    """The text of `files` in order (see the module's docstring), not yet looked at for invalid UTF-8.

    Blocks have up to about piece_bytes + block_bytes bytes where the text has a place to cut. counts: how far the files
    have been read, and what was replaced in JSON lines.
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
                    texts = iter([stream])
                for text in texts:
                    for block in _cut(text, path, block_bytes, piece_bytes):
                        counts.bytes = before + file.tell()
                        yield block
                counts.bytes = before + file.tell()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check the file") from error


def _records(stream: BinaryIO, lines: JsonLines, counts: ReadCounts) -> Iterator[BinaryIO]:
    """The text of each JSON line, as a text of its own."""
    for text in lines.texts(stream):
        counts.replaced += lines.replaced
        lines.replaced = 0
        yield BytesIO(text.encode())


def _cut(stream: BinaryIO, path: Path, block_bytes: int, piece_bytes: int) -> Iterator[Block]:
    """One text, cut behind separators, and where a document is long."""
    buffer = bytearray()
    offset = 0
    searched = 0  # no separator starts before this index of the buffer, and there is no place to cut before it
    inside = False  # part of the buffer's document has been given out
    while part := stream.read(block_bytes):
        buffer += part
        cut = buffer.rfind(_SEPARATOR, searched) + len(_SEPARATOR)
        goes_on = cut < len(_SEPARATOR)
        if goes_on:
            cut = _safe_cut(buffer, max(piece_bytes, searched))
        while cut:
            text = bytes(memoryview(buffer)[:cut])
            del buffer[:cut]
            yield Block(text, path, offset, inside, False)
            offset += cut
            inside, goes_on = goes_on, True
            cut = _safe_cut(buffer, piece_bytes)
        searched = max(0, len(buffer) - len(_SEPARATOR) + 1)
    if buffer or inside:
        yield Block(bytes(buffer), path, offset, inside, True)


def _safe_cut(data: bytearray, start: int) -> int:
    """The first place behind `start` between a letter or digit and a space or newline; 0 where there is none."""
    for found in _MAYBE_CUT.finditer(data, start):
        last = _LAST_CHARACTER.search(data[max(0, found.end() - 4) : found.end()])
        if last and last[0].decode(errors="replace").isalnum():
            return found.end()
    return 0
