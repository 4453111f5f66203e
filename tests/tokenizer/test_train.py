"""Training: the Rust core against the plain Python definition."""

import os
import signal
import subprocess
import sys
import warnings
from ast import literal_eval
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import END, PROSE, train_on, weird_text

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer, reference


def merges_of_words(words: Counter[bytes], wanted: int) -> list[tuple[bytes, bytes]]:
    counter = _core.WordCounter([], False)
    for word, count in words.items():
        counter.add_word(word, count)
    return counter.train(wanted, None)


def words_of_text(text: str, specials: list[str]) -> Counter[bytes]:
    counter = _core.WordCounter([name.encode() for name in specials], False)
    counter.feed(text)
    counter.finish()
    return Counter(dict(counter.words()))


few_letters = st.dictionaries(
    st.text("abc", min_size=1, max_size=40).map(str.encode), st.integers(1, 5), min_size=1, max_size=12
)


@settings(max_examples=400)
@given(few_letters)
def test_merges_equal_the_reference_on_words_full_of_ties_and_overlaps(words):
    assert merges_of_words(Counter(words), 60) == reference.train_on_words(Counter(words), 60)


@settings(max_examples=200)
@given(weird_text)
def test_merges_equal_the_reference_on_weird_text(text):
    words = words_of_text(text, [END])
    assert merges_of_words(words, 80) == reference.train_on_words(words, 80)


def test_text_to_merges_equals_the_reference(tmp_path):
    text = (PROSE + END) * 3 + PROSE
    tokenizer = train_on(tmp_path, text, 450, special_tokens=[END])
    assert tokenizer.merges == reference.train([text], 450, [END])
    assert tokenizer.vocab_size == 450
    assert tokenizer.vocab == {
        **{byte: bytes([byte]) for byte in range(256)},
        **{256 + rank: left + right for rank, (left, right) in enumerate(tokenizer.merges)},
        449: END.encode(),
    }


def test_ties_go_to_the_greater_pair_of_byte_strings_not_to_the_greater_concatenation():
    # ("ab", "b") and ("a", "bz") tie once "ab" and "bz" exist; as concatenations "abz" > "abb" would decide otherwise.
    words = Counter({b"ab": 9, b"bz": 8, b"abb": 2, b"qabz": 0})
    assert merges_of_words(words, 4)[:3] == [(b"a", b"b"), (b"b", b"z"), (b"ab", b"b")]
    assert merges_of_words(Counter({b"BA": 1, b"A\xff": 1, b"BAA": 1, b"ZZ": 2}), 1) == [(b"Z", b"Z")]


@settings(max_examples=200)
@given(few_letters)
def test_no_byte_string_is_made_twice(words):
    """As the core relies on (and argues for in train.rs)."""
    merges = reference.train_on_words(Counter(words), 60)
    assert len({left + right for left, right in merges}) == len(merges)


def test_counts_beyond_32_bits_keep_their_order():
    words = Counter({b"  ": 2**31 + 5, b"ab": 2**31 + 7, b"xy": 2**33, b"zz": 3})
    assert merges_of_words(words, 4) == [(b"x", b"y"), (b"a", b"b"), (b" ", b" "), (b"z", b"z")]


def test_neither_threads_nor_files_nor_their_order_change_anything(tmp_path):
    parts = [PROSE * 300, "", PROSE[::-1] * 400, "中文 " * 100_000, "x" * 3_000_000]
    paths = []
    for number, part in enumerate(parts):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(part)
    paths.remove(tmp_path / "1.txt")  # empty: refused by name, left out of a folder
    expected = Tokenizer.train(paths, 400, threads=1)
    assert Tokenizer.train(paths[::-1], 400, threads=3).fingerprint == expected.fingerprint
    assert Tokenizer.train([tmp_path], 400).fingerprint == expected.fingerprint


def test_three_threads_count_what_one_counts(tmp_path):
    """24 MB are work for three threads."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f" w{number * 7919 % 200_003}" for number in range(250_000)) * 14)
    assert path.stat().st_size > 24 << 20

    def counts(threads):
        counter = _core.WordCounter([], False, threads=threads)
        counter.count_files([path], 0, None)
        return counter.totals(), hash(frozenset(counter.words()))

    expected = counts(1)
    assert expected[0][:2] == (200_004, path.stat().st_size)
    assert counts(0) == counts(2) == counts(3) == expected


def test_special_tokens_never_enter_merges(tmp_path):
    specials = ["<|a|>", "<|a|><|a|>", ".*", "(", " x "]
    text = "".join(f"word{name}word word{name}{name}" for name in specials) * 20
    tokenizer = train_on(tmp_path, text, 265, special_tokens=specials)
    assert tokenizer.merges == reference.train([text], 265, specials)
    assert not any(b"|" in left + right or b"(" in left + right for left, right in tokenizer.merges)
    assert list(tokenizer.special_tokens.values()) == [260, 261, 262, 263, 264]


def test_warnings_point_at_the_line_that_trains(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xff"}')
    with pytest.warns(UserWarning, match="fewer than asked") as few:
        Tokenizer.train_from_texts(["aaa"], 300)
    with pytest.warns(UserWarning, match="were read as U") as replaced:
        Tokenizer.train([tmp_path / "a.jsonl"], 256, errors="replace")
    assert few[0].filename == replaced[0].filename == __file__


def test_too_little_text_trains_what_exists_and_says_so(tmp_path):
    with pytest.warns(
        UserWarning, match="yields 2 merges, 42 fewer than asked: the vocabulary has 258 tokens instead of 300"
    ):
        tokenizer = train_on(tmp_path, "abc", 300)
    assert tokenizer.merges == [(b"b", b"c"), (b"a", b"bc")]
    with pytest.warns(UserWarning, match="yields 0 merges"):
        assert train_on(tmp_path, "a\nb", 300).vocab_size == 256


@pytest.mark.parametrize(
    ("vocab_size", "specials", "message"),
    [
        (256, ["<a>"], "at least 257"),
        (10, [], "at least 256"),
        (300, ["<a>", "<a>"], "given twice"),
        (10**12, [], "at most 2097151 ids"),
        (2**63, [], "at most 2097151 ids"),
        (300, [""], "is empty"),
        (300, ["\ud800"], "lone surrogate"),
        (300, END, "give a list"),
    ],
)
def test_bad_arguments(tmp_path, vocab_size, specials, message):
    with pytest.raises(UserError, match=message):
        train_on(tmp_path, "some text", vocab_size, special_tokens=specials)


def test_bad_inputs(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for inputs, message in (
        ([tmp_path / "none.txt"], "no such file"),
        ([tmp_path / "empty.txt"], "is empty"),
        ([tmp_path / "folder"], "holds no text files"),
        ([], "no input"),
        (str(tmp_path / "empty.txt"), "is empty"),
    ):
        with pytest.raises(UserError, match=message):
            Tokenizer.train(inputs, 300)
    with pytest.raises(UserError, match="pattern"):
        train_on(tmp_path, "text", 300, pattern="p50k")
    with pytest.raises(UserError, match="threads"):
        train_on(tmp_path, "text", 300, threads=-1)
    with pytest.raises(UserError, match="errors"):
        train_on(tmp_path, "text", 300, errors="ignore")


def test_invalid_utf8_names_file_and_byte_or_is_replaced(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("good text " * 10)
    bad.write_bytes(b"good text " * 1_800_000 + b"b\xffd \xe4\xb8 text \xed\xa0\x80")
    with pytest.raises(UserError, match=r"bad\.txt: invalid UTF-8 at byte 18000001"):
        Tokenizer.train([good, bad], 270, threads=2)
    with pytest.warns(UserWarning, match="5 invalid UTF-8 sequences"):
        replaced = Tokenizer.train([good, bad], 270, errors="replace")
    bad.write_text(bad.read_bytes().decode(errors="replace"))
    assert Tokenizer.train([good, bad], 270).fingerprint == replaced.fingerprint


def test_progress_is_told_and_may_stop_the_work(tmp_path):
    told = []
    train_on(tmp_path, PROSE * 50, 400, progress=lambda *step: told.append(step))
    assert [step[0] for step in told] == sorted(step[0] for step in told)
    assert told[-1] == ("merge", 144, 144)

    def refuse(phase, done, total):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        train_on(tmp_path, PROSE * 50, 400, progress=refuse)


INTERRUPTED = """
import sys, time
from groundup.tokenizer import Tokenizer
told = []
def progress(*step):
    if step[1]:
        told.append(step)
        if len(told) == 1:
            print("ready", flush=True)
try:
    while True:
        Tokenizer.train([sys.argv[1]], 30000, threads=2, pattern=sys.argv[2], progress=progress)
except KeyboardInterrupt:
    print("interrupted", told[-1], flush=True)
"""


@pytest.mark.parametrize("pattern", ["gpt2", r"\w+ ?|[^\w]+"])
def test_ctrl_c_ends_training_soon(tmp_path, pattern):
    """With a pattern of one's own the whole file is one block, of some ten seconds' work."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f" w{number * 7919 % 1_000_003}" for number in range(1_500_000)) * 10)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(path), pattern], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    word, told = output.split(maxsplit=1)
    assert word == "interrupted"
    if pattern != "gpt2":  # and so it was told how far it is, and came nowhere near the end
        _, done, total = literal_eval(told)
        assert 0 < done < total / 2


def test_a_long_word_is_not_quadratic(tmp_path):
    """1 MB in one word: each of these took a quadratic trainer minutes (the test would time out)."""
    import random

    choose = random.Random(0).choices
    for text in (
        "a" * 1_000_000,
        "".join(choose("abcdefghijklmnop", k=1_000_000)),
        "".join(map(chr, choose(range(0x4E00, 0x9FFF), k=300_000))),
    ):
        assert train_on(tmp_path, text, 1000 if text[0] != "a" else 270).vocab_size in (1000, 270)


def test_training_works_in_a_forked_child(tmp_path):
    text = PROSE * (17_000_000 // len(PROSE.encode()))  # work for two threads
    expected = train_on(tmp_path, text, 300, threads=2).fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if train_on(tmp_path, text, 300, threads=2).fingerprint == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
