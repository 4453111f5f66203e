"""Patterns other than GPT-2's: scanners against the `regex` package, tiktoken and tokenizers; any expression."""

from itertools import pairwise

import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import CHARACTERS, END, PROSE, known_to, train_on, weird_text

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.formats import CL100K_PATTERN, LLAMA3_PATTERN, expression_of, pattern_name

TIKTOKENS_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN2 = LLAMA3_PATTERN.replace("{1,3}", "")
REGEX = {"cl100k": regex.compile(CL100K_PATTERN.replace(r"\z", r"\Z")), "llama3": regex.compile(LLAMA3_PATTERN)}


def scanned(text: str, pattern: str) -> list[str]:
    return [piece.decode() for piece in _core.pre_tokens(text, pattern)]


@pytest.mark.parametrize("name", ["cl100k", "llama3"])
@settings(max_examples=600)
@given(text=st.one_of(weird_text, st.text("aSſ'’1 \n\r\t.lLvVeErR\u3000", max_size=25)))
def test_equals_the_regex_package(name, text):
    assert scanned(text, name) == REGEX[name].findall(text)


@settings(max_examples=300)
@given(text=st.one_of(weird_text, st.text("aSſ'1 \n\r.lLvVeErR", max_size=25)))
def test_cl100k_cuts_where_tiktoken_cuts(text):
    """A vocabulary in which every merge of bytes exists shows tiktoken's cuts as far as two bytes reach."""
    known = known_to("tiktoken", text)
    tokens = [bytes([b]) for b in range(256)]
    pairs = {left + right for left, right in pairwise([bytes([b]) for b in known.encode()])}
    ranks = {token: rank for rank, token in enumerate([*tokens, *sorted(pairs)])}
    theirs = tiktoken.Encoding("x", pat_str=TIKTOKENS_CL100K, mergeable_ranks=ranks, special_tokens={})
    assert Tokenizer.from_ranks(ranks, pattern=TIKTOKENS_CL100K).encode(known) == theirs.encode(known)


def test_spellings_of_a_pattern_have_one_name():
    assert pattern_name(TIKTOKENS_CL100K) == pattern_name(CL100K_PATTERN) == "cl100k"
    assert pattern_name(LLAMA3_PATTERN) == "llama3"
    assert expression_of(QWEN2) == pattern_name(QWEN2) == QWEN2


@pytest.mark.parametrize("pattern", ["cl100k", "llama3", QWEN2, r"\w+|\W"])
def test_the_pattern_is_stored_and_gives_the_ids_of_tokenizers(tmp_path, pattern):
    tokenizer = train_on(tmp_path, (PROSE + END) * 3, 400, special_tokens=[END], pattern=pattern)
    tokenizer.save(tmp_path / "out")
    loaded = Tokenizer.load(tmp_path / "out")
    assert (loaded.pattern, loaded.fingerprint) == (pattern, tokenizer.fingerprint)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in (PROSE + END + PROSE, "a\n \n", " \n  ", "x'S 1234'LL\r\n\r\n..\n"):
        assert other.encode(text).ids == loaded.encode(text)
        assert list(loaded.encode_iterable(text)) == loaded.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert Tokenizer.train([tmp_path / "text.txt"], 400, [END], threads=2, pattern=pattern).merges == tokenizer.merges


def test_patterns_that_are_none(tmp_path):
    with pytest.raises(UserError, match='did you mean "cl100k"'):
        train_on(tmp_path, "text", 300, pattern="cl10k")
    with pytest.raises(UserError, match="not a regular expression"):
        train_on(tmp_path, "text", 300, pattern="(")


def test_a_pattern_that_gives_up_is_an_error_not_a_wrong_result(tmp_path):
    tokenizer = train_on(tmp_path, "ab " * 9, 256, pattern=r"(?:(a+)+\1)+(?<=a)\d|\S+|\s+")
    with pytest.raises(UserError, match="the pattern failed on this text"):
        tokenizer.encode("a" * 60 + "!")


WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{WORD_END}[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{WORD_END}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN = {"o200k": regex.compile(O200K), "qwen2": regex.compile(QWEN2)}


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=300)
@given(text=st.one_of(weird_text, st.text("aAbBǅʰ中é\u0301'’sSlL1 \n\r\t./", max_size=25)))
def test_patterns_of_ones_own_equal_the_regex_package(name, text):
    known = known_to("own", text)
    assert scanned(known, OWN[name].pattern) == OWN[name].findall(known)


@pytest.mark.parametrize("name", OWN)
def test_patterns_of_ones_own_on_prose(name):
    assert scanned(PROSE * 3, OWN[name].pattern) == OWN[name].findall(PROSE * 3)


def test_o200k_classes_every_character_as_the_regex_package_does():
    """Each code point after a small letter, before a capital, and after a number: the cuts show its class."""
    text = "".join(f"a{character}A1{character}." for character in known_to("own", CHARACTERS))
    assert scanned(text, O200K) == OWN["o200k"].findall(text)
