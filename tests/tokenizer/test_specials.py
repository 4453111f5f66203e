"""Allowed, disallowed and ordinary special tokens, as tiktoken tells them apart."""

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import END, PROSE, gpt2, train_on

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.formats import GPT2_PATTERN, token_ids

NAMES = [END, "<|fim|>", "(.*)+", "a b"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Tokenizer:
    return train_on(tmp_path_factory.mktemp("specials"), PROSE * 2, 400, special_tokens=NAMES)


@pytest.fixture(scope="module")
def theirs(ours) -> tiktoken.Encoding:
    ranks = token_ids(ours._parts)
    return tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=ours.special_tokens)


pieces = st.lists(st.sampled_from([*NAMES, END[:-1], "fim|>", "a", " b", " ", "dog"]), max_size=12).map("".join)
some = st.sets(st.sampled_from(NAMES))


@settings(max_examples=300)
@given(pieces, st.one_of(st.just("all"), some), st.one_of(st.just("all"), some))
def test_equals_tiktoken_in_ids_and_in_what_is_refused(ours, theirs, text, allowed, disallowed):
    if disallowed != "all" and allowed != "all":
        disallowed = disallowed - allowed
    try:
        expected = theirs.encode(text, allowed_special=allowed, disallowed_special=disallowed)
    except ValueError:
        for form in (text, text.encode()):
            with pytest.raises(UserError, match="disallowed special token"):
                ours.encode(form, allowed, disallowed)
        return
    assert ours.encode(text, allowed, disallowed) == expected
    assert ours.encode(text.encode(), allowed, disallowed) == expected
    assert ours.encode_numpy(text, allowed, disallowed).tolist() == expected
    assert ours.encode_batch([text, ""], 1, allowed, disallowed) == [expected, []]


def test_ordinary_text_holds_no_special_ids(ours, theirs):
    text = f"x{END}(.*)+a b{END}{END}"
    assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert ours.decode(ours.encode_ordinary(text)) == text
    assert not set(ours.encode_ordinary(text)) & set(ours.special_tokens.values())
    assert ours.encode(text)[1] == ours.special_tokens[END]


def test_overlapping_special_tokens_the_longest_wins_in_any_order():
    """openai/tiktoken#102: runs of 2 to 31 spaces as special tokens."""
    names = [" " * n for n in range(2, 32)]
    for order in (names, names[::-1]):
        tokenizer = Tokenizer(gpt2().vocab, gpt2().merges, order)
        ids = tokenizer.special_tokens
        for n in (2, 17, 31, 33, 62, 64):
            full, rest = divmod(n, 31)
            expected = [ids[" " * 31]] * full + ([ids[" " * rest]] if rest > 1 else [220] * rest)
            assert tokenizer.encode(" " * n) == expected
            assert tokenizer.encode(" " * n, set(names)) == expected


def test_bad_names(ours):
    with pytest.raises(UserError, match=r"no special token \(did you mean"):
        ours.encode("x", {"<|endoftext|"})
    with pytest.raises(UserError, match='give "all" or a set'):
        ours.encode("x", "<|endoftext|>")
    with pytest.raises(UserError, match="empty name"):
        ours.encode("x", "all", {""})
    with pytest.raises(UserError, match="at byte 3"):
        ours.encode(f"ä {END}".encode(), (), "all")
