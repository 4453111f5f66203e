"""Documents against str.split on the whole text, with blocks so small that everything straddles them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groundup.data import documents, write_embedded_corpus
from groundup.data.corpus import ReadCounts, read_blocks
from groundup.data.embedded import library_files
from groundup.errors import UserError

EOT = "<|endoftext|>"


def split_whole(text):
    return [part for part in text.split(EOT) if part.strip()]


def read(*paths, errors="strict", **options):
    """The blocks of the files, and the documents put together from them."""
    blocks = list(read_blocks(paths, errors=errors, **options))
    found, held = [], b""
    for block in blocks:
        texts, unfinished, _, _ = block.documents(errors)
        for place, text in enumerate(texts):
            held += text
            if not (unfinished and place == len(texts) - 1):
                found.append(held.decode())
                held = b""
    assert not held
    return blocks, found


words = [
    EOT,
    EOT,
    "<|endof",
    "text|>",
    "<",
    "|>",
    "ä",
    "日本",
    "🎉",
    " ",
    "\n",
    "a",
    "word ",
    "x1 y2\n",
    "\u00a0",
    "\ufffd",
]
fragments = st.lists(st.sampled_from(words), max_size=30)
byte_strings = [b"a", b"\xc3\xa4", b"\xc3", b"\xe2\x82", b"\x80", b"\xff", b"\xf0\x9f\x8e", b"\xf0\x9f\x8e\x89"]
byte_strings += [b"\xef\xbf\xbd", b"<|endoftext|>", b" "]


@settings(max_examples=200)
@given(fragments=fragments, block=st.integers(1, 40), piece=st.integers(1, 30))
def test_any_block_size_gives_the_split_of_the_whole(tmp_path_factory, fragments, block, piece):
    text = "".join(fragments)
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_bytes(text.encode())
    counts = ReadCounts()
    blocks, found = read(path, counts=counts, block_bytes=block, piece_bytes=piece)
    assert found == split_whole(text)
    assert counts.bytes == len(text.encode())
    assert b"".join(block.text for block in blocks) == text.encode()
    for before, after in pairwise(blocks):
        assert after.offset == before.offset + len(before.text)
        if not before.text.endswith(EOT.encode()):  # a cut inside a document: letter or digit, then space or newline
            assert before.text.decode()[-1].isalnum()
            assert after.text[:1] in {b" ", b"\n", b""}
    empty = sum(block.documents("strict").empty for block in blocks)
    parts = text.split(EOT)
    assert empty == sum(not part.strip() for part in parts) - (parts[-1] == "")


@settings(max_examples=200)
@given(data=st.lists(st.sampled_from(byte_strings), max_size=12), block=st.integers(1, 9), piece=st.integers(1, 9))
def test_invalid_bytes_anywhere(tmp_path_factory, data, block, piece):
    data = b"".join(data)
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_bytes(data)
    blocks, found = read(path, errors="replace", block_bytes=block, piece_bytes=piece)
    text = data.decode(errors="replace")
    assert found == split_whole(text)
    replaced = sum(block.documents("replace").replaced for block in blocks)
    assert replaced == text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(UserError, match=f"invalid UTF-8 at byte {error.start} .0x{data[error.start]:02x}"):
            read(path, block_bytes=block, piece_bytes=piece)
    else:
        assert read(path, block_bytes=block, piece_bytes=piece)[1] == split_whole(text)


def test_the_byte_offset_is_the_files_not_the_blocks(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes("ä".encode() * 700_000 + b"\xff" + b"rest")
    with pytest.raises(UserError, match=re.escape(f"{path}: invalid UTF-8 at byte 1400000 (0xff)")):
        list(documents([path]))
    assert len(next(documents([path], errors="replace"))) == 700_005


def test_a_separator_ending_a_file_or_missing_there(tmp_path):
    for name, text in {"a": f"one{EOT}two", "b": f"{EOT}three{EOT}\n", "c": f"{EOT}{EOT}four{EOT} {EOT}"}.items():
        (tmp_path / name).write_text(text)
    assert list(documents([tmp_path / "a", tmp_path / "b", tmp_path / "c"])) == ["one", "two", "three", "four"]
    assert list(documents([tmp_path])) == ["one", "two", "three", "four"]
    assert list(documents(tmp_path)) == list(documents(str(tmp_path))) == ["one", "two", "three", "four"]


def test_a_document_larger_than_blocks_comes_in_bounded_pieces(tmp_path):
    text = "some words 12, and more. " * 4000
    (tmp_path / "long.txt").write_text(text)
    blocks, found = read(tmp_path / "long.txt", block_bytes=500, piece_bytes=1000)
    assert found == [text]
    assert max(len(block.text) for block in blocks) <= 1600
    word = "x" * 30_000
    (tmp_path / "word.txt").write_text(word)
    assert read(tmp_path / "word.txt", block_bytes=500, piece_bytes=1000)[1] == [word]


def test_cuts_are_pretoken_boundaries_of_every_common_pattern(tmp_path):
    """Pre-tokens of the pieces, one after another, are those of the whole (the regex module's view)."""
    regex = pytest.importorskip("regex")
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    cl100k = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
        r"\s*[\r\n]|\s+(?!\S)|\s"
    )
    text = Path(__file__).read_text() + "it's 12345 \n\n  日本 語\n ½ x² a_b  \t\n" * 20
    (tmp_path / "t.txt").write_text(text.replace(EOT, ""))
    pieces = [block.text.decode() for block in read_blocks([tmp_path / "t.txt"], block_bytes=7, piece_bytes=5)]
    assert len(pieces) > 200
    for pattern in (gpt2, cl100k):
        found = [token for piece in pieces for token in regex.findall(pattern, piece)]
        assert found == regex.findall(pattern, "".join(pieces))


def test_inputs_that_cannot_be_used(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    (tmp_path / "folder").mkdir()
    for path, message in {
        tmp_path / "missing.txt": "no such file or folder",
        empty: "the file is empty",
        tmp_path / "folder": "holds no text files",
        Path("/dev/null"): "neither a regular file nor a folder",
    }.items():
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: .*{message}"):
            list(documents([path]))
    with pytest.raises(UserError, match="no input given"):
        list(documents([]))
    with pytest.raises(UserError, match='errors is "ignore"'):
        list(documents([__file__], errors="ignore"))


def test_the_embedded_corpus_is_the_library_capped_and_the_same_each_time(tmp_path):
    corpus = write_embedded_corpus(tmp_path / "a.txt", max_bytes=400_000)
    found = list(documents([corpus.path]))
    assert len(found) == corpus.documents > 10
    assert sum(len(text.encode()) for text in found) == corpus.bytes
    assert 200_000 < corpus.bytes <= 400_000
    assert any("import " in text for text in found)
    again = write_embedded_corpus(tmp_path / "b.txt", max_bytes=400_000)
    assert again.path.read_bytes() == corpus.path.read_bytes()
    assert not [path for path in library_files() if {"test", "site-packages"} & set(path.parts)]


def test_the_embedded_corpus_skips_and_counts_what_is_not_utf8(tmp_path):
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "no.py").write_text("no = 1")
    (library / "a.py").write_text("a = 1\n")
    (library / "b.py").write_text("b = 'ü'\n", encoding="utf-8")
    (library / "latin.py").write_bytes(b"x = '\xfc'\n")
    (library / "__init__.py").touch()
    corpus = write_embedded_corpus(tmp_path / "out.txt", root=library)
    assert (corpus.documents, corpus.skipped) == (2, 1)
    assert sorted(documents([corpus.path])) == ["a = 1\n", "b = 'ü'\n"]
    with pytest.raises(UserError, match="no standard library in source form"):
        write_embedded_corpus(tmp_path / "none.txt", root=tmp_path / "nothing")
