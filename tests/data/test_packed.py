"""Packed files and JSON lines give the documents, and the token directory, of the plain text they hold."""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from groundup.data import documents, tokenize_corpus
from groundup.data.corpus import ReadCounts, read_blocks
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer

EOT = "<|endoftext|>"
DOCUMENTS = [f"Document {n}: naïve 😀 text, {'many words ' * (n % 50)}\nand a line.\n" for n in range(300)]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def write(folder: Path, kind: str, suffix: str, field: str = "text") -> Path:
    path = folder / f"corpus.{kind}{suffix}"
    lines = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(DOCUMENTS))
    path.write_bytes(PACKERS[suffix]((EOT.join(DOCUMENTS) if kind == "txt" else lines).encode()))
    return path


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_documents_and_bytes_read(tmp_path, kind, suffix):
    path = write(tmp_path, kind, suffix)
    assert list(documents(path)) == DOCUMENTS
    counts = ReadCounts()
    held = b"".join(block.text for block in read_blocks([path, path], counts=counts, block_bytes=97, piece_bytes=50))
    assert held.decode().replace(EOT, "") == "".join(DOCUMENTS) * 2
    assert counts.bytes == 2 * path.stat().st_size


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_from_texts(DOCUMENTS, 300, [EOT])


@pytest.mark.parametrize(("kind", "suffix"), [("txt", ".gz"), ("txt", ".zst"), ("jsonl", ""), ("jsonl", ".xz")])
def test_the_token_directory_is_that_of_the_plain_text(tmp_path, tokenizer, kind, suffix):
    told = []
    plain = tokenize_corpus(write(tmp_path, "txt", ""), None, tokenizer, tmp_path / "plain")
    path = write(tmp_path, kind, suffix)
    meta = tokenize_corpus(path, None, tokenizer, tmp_path / "packed", progress=lambda *step: told.append(step))
    assert meta["splits"] == plain["splits"]
    assert told[-1] == ("encode", path.stat().st_size, path.stat().st_size)
    for name in ("train", "valid"):
        assert np.array_equal(np.load(tmp_path / "plain" / f"{name}.npy"), np.load(tmp_path / "packed" / f"{name}.npy"))


def test_json_lines_with_another_field_and_with_separators_inside(tmp_path, tokenizer):
    path = write(tmp_path, "jsonl", ".gz", field="body")
    assert list(documents(path, text_field="body")) == DOCUMENTS
    meta = tokenize_corpus(path, None, tokenizer, tmp_path / "out", text_field="body")
    assert sum(split["documents"] for split in meta["splits"].values()) == len(DOCUMENTS)
    with pytest.raises(UserError, match=r'corpus\.jsonl\.gz: line 1 is not .* field "text"'):
        list(documents(path))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"one{EOT}two{EOT}"}) + '\n{"text": " "}\n')
    assert list(documents(tmp_path / "a.jsonl")) == ["one", "two"]


def test_what_cannot_be_read_is_said(tmp_path, tokenizer):
    for suffix in (".gz", ".xz", ".zst"):
        path = write(tmp_path, "txt", suffix)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match="cannot be unpacked"):
            tokenize_corpus(path, None, tokenizer, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    path = tmp_path / "bad.txt.gz"
    path.write_bytes(gzip.compress(b"abc \xff"))
    with pytest.raises(UserError, match=r"bad\.txt\.gz: invalid UTF-8 at byte 4"):
        list(documents(path))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a\xff"}\n{"text": "\\ud800"}')
    counts = ReadCounts()
    blocks = list(read_blocks([tmp_path / "bad.jsonl"], errors="replace", counts=counts))
    assert [block.text.decode() for block in blocks] == ["a\ufffd", "\ufffd"]
    assert counts.replaced == 2


def test_long_documents_stay_whole_where_the_patterns_boundaries_are_not_known(tmp_path):
    """A pattern of one's own may take a letter and the space after it together."""
    text = "ab cd " * 400_000
    (tmp_path / "long.txt").write_text(text + EOT + "end")
    tokenizer = Tokenizer.train_from_texts(["ab cd ab cd"], 261, [EOT], pattern=r"\w+ |.")
    (tmp_path / "valid.txt").write_text("ab")
    tokenize_corpus(tmp_path / "long.txt", tmp_path / "valid.txt", tokenizer, tmp_path / "out")
    expected = tokenizer.encode_numpy(text + EOT + "end" + EOT)
    assert np.array_equal(np.load(tmp_path / "out" / "train.npy"), expected)
