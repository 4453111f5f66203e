"""Encoding and decoding: against the plain definition, tiktoken and tokenizers."""

import os
import pickle
import random
import threading
import warnings

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from texts import END, PROSE, PYTHON, gpt2, known_to, real_text, train_on, weird_text

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer, reference
from groundup.tokenizer.formats import GPT2_PATTERN, token_ids


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    """A few hundred merges, some of which overlap themselves, and special tokens that overlap each other."""
    specials = [END, END + END, "<|", "(.*)", "中文没"]
    return train_on(tmp_path_factory.mktemp("small"), PROSE * 2, 450, special_tokens=specials)


@pytest.fixture(scope="module")
def gpt2_tiktoken() -> tiktoken.Encoding:
    ranks = token_ids(gpt2()._parts)
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=gpt2().special_tokens)


@settings(max_examples=300)
@given(text=weird_text)
@example(text=PROSE)
@example(text=f"{END}{END}{END}<|endoftext<||>(.*)中文没有")
def test_ids_equal_the_reference_and_decode_to_the_text(small, text):
    known = known_to(PYTHON, text)
    ids = small.encode(known)
    assert ids == reference.encode(known, small.vocab, small.merges, small.special_tokens)
    assert small.decode(small.encode(text)) == text
    assert small.encode_numpy(text).tolist() == small.encode(text)


@settings(max_examples=300)
@given(text=weird_text)
@example(text=PROSE)
def test_gpt2_ids_equal_those_of_tiktoken(gpt2_tiktoken, text):
    known = known_to("tiktoken", text)
    assert gpt2().encode(known) == gpt2_tiktoken.encode(known, allowed_special="all")


def test_gpt2_ids_known_by_heart():
    assert gpt2().encode("Hello, world! It's 2024.") == [15496, 11, 995, 0, 632, 338, 48609, 13]
    assert (gpt2().vocab_size, gpt2().eot_id, gpt2().encode(END)) == (50257, 50256, [50256])


@pytest.mark.slow
def test_gpt2_ids_equal_those_of_tiktoken_on_real_text(gpt2_tiktoken, corpora):
    for name in ("stories_valid", "multilingual_20mb", "code_16mb"):
        text = real_text(corpora, name, 4_000_000)
        assert gpt2().encode(text) == gpt2_tiktoken.encode(text, allowed_special="all")


@settings(max_examples=200)
@given(text=st.text("ab \n'", min_size=1, max_size=400))
def test_pieces_of_any_length_equal_the_reference(small, text):
    piece = text.replace("\n", "a").replace(" ", "b").replace("'", "a")
    assert small.encode(piece) == reference.encode(piece, small.vocab, small.merges)
    assert small.encode(text) == reference.encode(text, small.vocab, small.merges)


LONG = 10_000_000
RANDOM = random.Random(0)


@pytest.mark.parametrize(
    "text",
    [
        *(character * LONG for character in "a ^\n"),
        " \n" * (LONG // 2),
        "".join(RANDOM.choices("abcdefghijklmnopqrstuvwxyz", k=LONG)),
        "".join(map(chr, RANDOM.choices(range(0x4E00, 0x9FFF), k=LONG // 3))),
    ],
    ids=["letter", "spaces", "carets", "newlines", "space-newline", "random-letters", "cjk"],
)
def test_ten_megabytes_without_a_word_boundary(text):
    """Others overflow the stack or take minutes here; a quadratic or recursive encoder would not come back."""
    ids = gpt2().encode_numpy(text)
    assert gpt2().decode_bytes(ids) == text.encode()


def test_very_long_pieces_equal_tiktoken(gpt2_tiktoken):
    for letters in ("a", "ab", " ", "aA^", "\n", "0123456789", "abcdefghijklmnopqrstuvwxyz"):
        text = "".join(random.Random(1).choices(letters, k=30_000))
        assert gpt2().encode(text) == gpt2_tiktoken.encode(text)


@settings(max_examples=300)
@given(text=weird_text, data=st.data())
def test_iterables_give_the_same_ids_wherever_they_are_cut(small, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert list(small.encode_iterable(chunks)) == small.encode(text)
    assert list(small.encode_iterable(text)) == small.encode(text)
    blocks = text.encode()
    assert list(small.encode_iterable(blocks[i : i + 1] for i in range(len(blocks)))) == small.encode(text)


def test_iterables_are_lazy_and_keep_little():
    def endless():
        while True:
            yield PROSE

    ids = gpt2().encode_iterable(endless())
    taken = [next(ids) for _ in range(100_000)]
    assert gpt2().decode(taken).startswith(PROSE * 300)


def test_batches_on_threads_equal_single_texts(small):
    texts = [PROSE[i % 50 :] * (i % 7) for i in range(500)]
    assert small.encode_batch(texts, threads=3) == [small.encode(text) for text in texts]
    assert small.encode_batch([]) == []


def test_many_threads_at_once(small):
    expected = small.encode(PROSE * 200)
    wrong = []

    def work():
        for _ in range(20):
            if small.encode(PROSE * 200) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_forked_children_encode_after_the_parent_has_used_threads(small):
    texts = [PROSE * 50] * 40
    expected = small.encode_batch(texts, threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if small.encode_batch(texts, threads=2) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(pickle.dumps(small)).encode(PROSE) == small.encode(PROSE)


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_come_back(small, data):
    assert small.decode_bytes(small.encode(data)) == data


def test_bytes_that_are_text_are_encoded_like_text(small):
    assert small.encode(PROSE.encode()) == small.encode(PROSE)


def test_numpy_types(small):
    assert small.encode_numpy("dog").dtype == np.uint16
    assert small.encode_numpy("").shape == (0,)
    large = Tokenizer({**{b: bytes([b]) for b in range(256)}, **{256 + i: b"x%d" % i for i in range(65_400)}}, [])
    assert large.encode_numpy("dog").dtype == np.uint32
    assert large.encode_numpy("dog").tolist() == [100, 111, 103]
    assert small.decode(small.encode_numpy(PROSE)) == PROSE


def test_lone_surrogates_are_an_error(small):
    for call in (
        small.encode,
        small.encode_numpy,
        lambda text: small.encode_batch([text]),
        lambda text: list(small.encode_iterable([text])),
    ):
        with pytest.raises(UserError, match="lone surrogate U\\+D83D at character 2"):
            call("ab\ud83d")
    with pytest.raises(TypeError, match="str or bytes"):
        small.encode(17)


def test_errors_of_the_callers_iterator_stay_what_they_are(small, tmp_path):
    def broken():
        yield PROSE
        raise ValueError("my own trouble")

    with pytest.raises(ValueError, match="my own trouble"):
        list(small.encode_iterable(broken()))
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UnicodeDecodeError), open(tmp_path / "latin.txt", encoding="utf-8") as lines:
        list(small.encode_iterable(lines))
    with pytest.raises(ValueError, match="my own trouble"):
        small.encode_batch(broken())
    ids = small.encode_iterable([PROSE])
    next(ids)
    with pytest.raises(ValueError, match="of the reader"):
        ids.throw(ValueError("of the reader"))


def test_unknown_ids_are_an_error(small):
    for bad in (450, -1, 2**70):
        with pytest.raises(UserError, match=f"id {bad} is not in the vocabulary: legal ids are 0 to 449"):
            small.decode([100, bad])
        with pytest.raises(UserError, match="legal ids"):
            small.token_bytes(bad)


def test_decoding_half_a_character(small):
    assert small.decode([0xE4, 0xB8]) == "\ufffd"
    with pytest.raises(UnicodeDecodeError):
        small.decode([0xE4, 0xB8], errors="strict")
    assert small.decode([0xE4, 0xB8], errors="ignore") == ""
    assert small.decode([]) == ""


def test_the_word_cache_is_visible_and_bounded():

    tokenizer = gpt2()
    tokenizer.encode("a")
    before = tokenizer.cache_bytes
    assert 0 < before <= tokenizer.CACHE_BYTES
    letters = random.Random(3)
    for _ in range(12):
        words = (letters.randbytes(letters.choice((5, 9, 40))).hex() for _ in range(40_000))
        tokenizer.encode_numpy(" ".join(words))
        assert tokenizer.cache_bytes <= tokenizer.CACHE_BYTES
    assert tokenizer.cache_bytes > max(before, 4 << 20)


def test_the_word_caches_of_many_threads_share_a_bound():
    tokenizer = Tokenizer._from_parts(gpt2()._parts)
    start, bytes_of = threading.Barrier(16), random.Random(5).randbytes
    texts = [" ".join(bytes_of(5).hex() for _ in range(100_000)) for _ in range(16)]

    def work(number: int) -> None:
        for turn in range(4):
            start.wait()
            tokenizer.encode_numpy(texts[(number + turn) % 16])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.cache_bytes <= 2 * tokenizer.CACHE_BYTES


@pytest.mark.parametrize("character", [" ", "\n", "\t"])
def test_a_run_of_white_space_comes_out_while_it_arrives(character):
    tokenizer, taken = gpt2(), 0

    def chunks():
        nonlocal taken
        yield "words:"
        for _ in range(100):
            taken += 1
            yield character * 10_007
        yield "end"

    ids = list(tokenizer.encode_iterable(chunks()))
    assert ids == tokenizer.encode("words:" + character * 1_000_700 + "end")
    taken = 0
    stream = tokenizer.encode_iterable(chunks())
    for _ in range(3):
        next(stream)
    assert taken < 10
