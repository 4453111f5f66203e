"""The pure-Python ladder: every step equals the naive trainer and the Rust core."""

import io
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import END, PROSE, real_text, train_on, weird_text

from groundup import _core
from groundup.tokenizer import reference
from groundup.tokenizer.ladder import STEPS, incremental
from groundup.tokenizer.ladder.parallel import count_file, part_ends, safe_cuts
from groundup.tokenizer.ladder.streaming import count_stream, whole_blocks

SPECIALS = [END, "<pad> x", " \n<", "e t"]

few_letters = st.dictionaries(
    st.text("abc", min_size=1, max_size=30).map(str.encode), st.integers(1, 5), min_size=1, max_size=12
)


@settings(max_examples=150)
@given(few_letters)
def test_incremental_equals_naive_on_words_full_of_ties_and_overlaps(words):
    assert incremental.train_on_words(Counter(words), 50) == reference.train_on_words(Counter(words), 50)


def test_every_step_equals_the_core(tmp_path):
    core = train_on(tmp_path, (PROSE + END + "<pad> x") * 3 + PROSE, 320, special_tokens=SPECIALS)
    assert len(core.merges) == 60
    for name, step in STEPS.items():
        assert step(tmp_path / "text.txt", 320, SPECIALS) == core.merges, name


@pytest.mark.slow
def test_every_fast_step_equals_the_core_on_real_text(corpora, tmp_path):
    core = train_on(tmp_path, real_text(corpora, "stories_valid", 2_000_000), 3000, special_tokens=[END])
    for name in ("incremental", "parallel", "streaming"):
        assert STEPS[name](tmp_path / "text.txt", 3000, [END]) == core.merges, name


@settings(max_examples=100)
@given(weird_text, st.lists(st.sampled_from([*SPECIALS, " ", "\n", "\u3000", "x"]), max_size=6))
def test_no_safe_cut_changes_a_count(text, more):
    """Every cut of every text, against the whole."""
    text = "".join([text, *more, text, " x" * 9])
    data = text.encode()
    whole = reference.count_words([text], SPECIALS)
    cuts = list(safe_cuts(data, 0, SPECIALS))
    for cut in cuts:
        parts = [data[:cut].decode(), data[cut:].decode()]
        assert reference.count_words(parts, SPECIALS) == whole, parts
    bounds = [0, *cuts, len(data)]
    assert reference.count_words([data[a:b].decode() for a, b in pairwise(bounds)], SPECIALS) == whole


@settings(max_examples=150)
@given(weird_text, st.integers(1, 40))
def test_blocks_of_any_size_count_the_same(text, size):
    text += END + text
    whole = reference.count_words([text], SPECIALS)
    blocks = list(whole_blocks(io.BytesIO(text.encode()), SPECIALS, size))
    assert b"".join(blocks).decode() == text
    assert reference.count_words([block.decode() for block in blocks], SPECIALS) == whole


def test_blocks_are_bounded_and_only_an_endless_word_is_held_whole():
    text = b"some words and more words\n" * 1000
    assert max(map(len, whole_blocks(io.BytesIO(text), [END], 512))) < 600
    endless = io.BytesIO(b"a" * 5000 + b" b" * 100)
    assert len(next(whole_blocks(endless, [END], 512))) > 5000


def test_parts_of_a_file_are_even_and_any_number_of_processes_counts_the_same(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes((PROSE * 40 + "中" * 70_000 + END + PROSE * 20).encode())
    text = path.read_bytes().decode()
    whole = Counter(dict(_words_of_core(text)))
    for parts in (1, 3, 7, 500):
        ends = part_ends(path, SPECIALS, parts)
        assert ends == sorted(set(ends))
        assert ends[-1] == path.stat().st_size
        assert len(ends) <= parts
    assert count_file(path, SPECIALS, 2) == whole
    with open(path, "rb") as file:
        assert count_stream(file, SPECIALS, 2, 10_000) == whole


def _words_of_core(text: str) -> list[tuple[bytes, int]]:
    counter = _core.WordCounter([name.encode() for name in SPECIALS], False)
    counter.feed(text)
    counter.finish()
    return counter.words()
