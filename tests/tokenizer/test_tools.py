"""What info, compare and profile report, against plain counts."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from texts import END, PROSE, gpt2, gpt2_folder, train_on, weird_text

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.compare import compare
from groundup.tokenizer.info import Node, count_tokens, describe, draw, merge_trees, shown
from groundup.tokenizer.profile import profile_core, profile_ladder
from groundup.tokenizer.sources import blocks


def check(node: Node, tokenizer: Tokenizer) -> None:
    """The node's parts are what the merge of its rank says, and earlier merges made them."""
    assert tokenizer.token_bytes(node.id) == node.token
    if not node.parts:
        assert len(node.token) == 1
        return
    assert node.rank is not None
    assert tuple(part.token for part in node.parts) == tokenizer.merges[node.rank]
    for part in node.parts:
        assert part.rank is None or part.rank < node.rank
        check(part, tokenizer)


@settings(max_examples=60)
@given(weird_text)
def test_the_trees_of_a_text_are_its_tokens_and_their_merges(text):
    trees = merge_trees(small_gpt2(), text)
    assert [tree.id for tree in trees] == small_gpt2().encode_ordinary(text)
    for tree in trees:
        check(tree, small_gpt2())


def small_gpt2(kept=[]) -> Tokenizer:  # noqa: B006 (a cache)
    """GPT-2's first 2000 merges."""
    if not kept:
        merges = gpt2().merges[:2000]
        tokens = [*(bytes([b]) for b in range(256)), *(left + right for left, right in merges)]
        kept.append(Tokenizer(dict(enumerate(tokens)), merges))
    return kept[0]


def test_a_tree_drawn():
    tree = merge_trees(gpt2(), " the")
    assert list(draw(tree[0])) == [
        '" the"  id 262, merge 6',
        '├─ " t"  id 256, merge 0',
        '│  ├─ " "  id 220, byte',
        '│  └─ "t"  id 83, byte',
        '└─ "he"  id 258, merge 2',
        '   ├─ "h"  id 71, byte',
        '   └─ "e"  id 68, byte',
    ]


@pytest.mark.parametrize(
    ("token", "text"), [(b" a\n", r" a\n"), (b"\xc3", r"\xc3"), ("é中".encode(), "é中"), (b'"', '"'), (b"\\", r"\\")]
)
def test_tokens_are_shown_on_one_line(token, text):
    assert shown(token) == text


def test_description_of_gpt2(tmp_path):
    (tmp_path / "text.txt").write_text(PROSE * 10)
    found = describe(gpt2(), 2, "dog", tmp_path / "text.txt")
    assert (found["vocab_size"], found["merges"], found["special_tokens"]) == (50257, 50000, {END: 50256})
    assert [row["bytes"] for row in found["longest"]] == sorted(map(len, gpt2().vocab.values()))[:-3:-1]
    tokens = len(gpt2().encode(PROSE * 10))
    assert found["text"]["bytes_per_token"] == len(PROSE.encode()) * 10 / tokens
    assert found["word"][0]["id"] == gpt2().encode("dog")[0]


def test_counting_a_file_streams_it(tmp_path, monkeypatch):
    monkeypatch.setattr("groundup.tokenizer.sources.BLOCK", 7)
    (tmp_path / "text.txt").write_text(PROSE * 3)
    assert count_tokens(gpt2(), tmp_path / "text.txt") == (len(PROSE.encode()) * 3, len(gpt2().encode(PROSE * 3)))
    (tmp_path / "empty.txt").touch()
    for name, message in (("none.txt", "No such file"), ("empty.txt", "is empty")):
        with pytest.raises(UserError, match=message):
            count_tokens(gpt2(), tmp_path / name)
        with pytest.raises(UserError, match=message):
            compare([gpt2_folder()], [tmp_path / name])


def test_packed_files_and_json_lines_count_their_texts(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in (PROSE, "", "don", "'t"))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(PROSE.encode() * 200))
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    whole = len(PROSE.encode()) * 200, len(gpt2().encode(PROSE * 200))
    several = len(PROSE.encode()) + 5, sum(len(gpt2().encode(text)) for text in (PROSE, "don", "'t"))
    files = [tmp_path / name for name in ("a.txt.gz", "b.jsonl", "c.jsonl.xz")]
    rows = compare([gpt2_folder()], files)
    for file, row, expected in zip(files, rows, [whole, several, several], strict=False):
        assert count_tokens(gpt2(), file) == (row["bytes"], row["cells"][0]["tokens"]) == expected
    (tmp_path / "d.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n')
    for name in ("d.gz", "e.jsonl"):
        with pytest.raises(UserError, match="is empty"):
            count_tokens(gpt2(), tmp_path / name)


def test_a_packed_file_that_cannot_be_read_is_named_and_the_callers_errors_are_not_the_files(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "abc"}'))

    def broken(*_):
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        list(blocks(path, broken))

    def refusing(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("groundup.tokenizer.sources.open", refusing, raising=False)
    for call in (count_tokens, lambda _, path: Tokenizer.train([path], 300)):
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read \(Permission denied\)"):
            call(gpt2(), path)


def test_comparison_counts_tokens_and_adds_up(tmp_path):
    ours = train_on(tmp_path, PROSE * 20, 400)
    ours.save(tmp_path / "ours")
    (tmp_path / "other.txt").write_text("the dog " * 500)
    files = [tmp_path / "text.txt", tmp_path / "other.txt"]
    rows = compare([gpt2_folder(), tmp_path / "ours"], files)
    assert [row["file"] for row in rows] == ["text.txt", "other.txt", "all"]
    for column, tokenizer in enumerate((gpt2(), ours)):
        counts = [len(tokenizer.encode(file.read_bytes())) for file in files]
        cells = [row["cells"][column] for row in rows]
        assert [cell["tokens"] for cell in cells] == [*counts, sum(counts)]
        for row, cell in zip(rows, cells, strict=True):
            assert cell["bytes_per_token"] == row["bytes"] / cell["tokens"]
            assert cell["mb_per_second"] == pytest.approx(row["bytes"] / 1e6 / cell["seconds"])


def test_phases_of_training(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(PROSE * 2000)
    rows, tokenizer = profile_core([path], 400, [END], 1)
    assert tokenizer.fingerprint == Tokenizer.train([path], 400, [END]).fingerprint
    assert [(row["phase"], row["done"]) for row in rows] == [
        ("count", path.stat().st_size),
        ("merge", len(tokenizer.merges)),
        ("build", 0),
    ]
    assert all(row["seconds"] > 0 and row["peak_bytes"] >= 0 for row in rows)


@pytest.mark.parametrize("step", ["naive", "incremental", "parallel", "streaming"])
def test_the_ladders_profile_counts_the_calls_of_all_processes(tmp_path: Path, step: str):
    path = tmp_path / "text.txt"
    path.write_text("a bb ccc " * 50)
    rows = profile_ladder(step, [path], 260, [END], min(2, os.cpu_count() or 1), 1000)
    calls = {row["function"].split()[-1]: row["calls"] for row in rows}
    assert calls["_contraction"] == 151  # once a pre-token, wherever the file was cut
    assert calls["train_on_words"] == 1
