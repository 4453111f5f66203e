"""tiktoken's vocabularies and objects, and those of Hugging Face, made from ours and read into ours."""

import itertools
import random
import sys

import pytest
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import END, PROSE, gpt2, train_on

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.formats import GPT2_PATTERN


def test_live_objects_give_the_same_ids(tmp_path):
    tokenizer = train_on(tmp_path, PROSE * 3, 450, special_tokens=[END])
    text = PROSE + END + PROSE
    assert tokenizer.to_tiktoken().encode(text, allowed_special="all") == tokenizer.encode(text)
    assert tokenizer.to_hf().encode(text).ids == tokenizer.encode(text)
    assert gpt2().to_tiktoken().encode(PROSE) == gpt2().encode(PROSE)


def test_rank_files_reload(tmp_path):
    gpt2().save_ranks(tmp_path / "gpt2.tiktoken")
    loaded = Tokenizer.from_ranks(tmp_path / "gpt2.tiktoken", gpt2().special_tokens, pattern="gpt2")
    assert loaded.vocab == gpt2().vocab
    assert loaded.encode(PROSE + END) == gpt2().encode(PROSE + END)
    assert tiktoken.load.load_tiktoken_bpe(str(tmp_path / "gpt2.tiktoken")) == loaded.to_tiktoken()._mergeable_ranks
    loaded.save(tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").encode(PROSE * 3 + END) == gpt2().encode(PROSE * 3 + END)


@settings(max_examples=300)
@given(st.lists(st.text("ab", min_size=2, max_size=6), max_size=25, unique=True), st.integers(0, 2**32))
def test_any_set_of_tokens_gives_tiktokens_ids(words, seed):
    """Also sets that no training would give, where tokens can be made in several ways, or in none."""
    tokens = [*(bytes([b]) for b in range(256)), *map(str.encode, words)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.from_ranks(ranks, pattern="gpt2")
    choose = random.Random(seed)
    for length in (1, 3, 7, 20, 60, 300, 6000 if seed % 20 == 0 else 90):
        text = "".join(choose.choices("ab", k=length))
        assert ours.encode(text) == theirs.encode(text)


def test_unusable_ranks(tmp_path):
    good = {bytes([b]): b for b in range(256)}
    with pytest.raises(UserError, match="same rank"):
        Tokenizer.from_ranks({**good, b"ab": 7})
    with pytest.raises(UserError, match="rank of a token"):
        Tokenizer.from_ranks(good, {"<a>": 7})
    with pytest.raises(UserError, match="no token for the byte"):
        Tokenizer.from_ranks({b"a": 0, b"b": 1})
    (tmp_path / "bad.tiktoken").write_text("YQ== 0\n??? x\n")
    with pytest.raises(UserError, match="line 2"):
        Tokenizer.from_ranks(tmp_path / "bad.tiktoken")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.from_ranks(tmp_path / "none.tiktoken")
    reordered = {**{i: bytes([i]) for i in range(256)}, 256: b"cd", 257: b"ab"}
    with pytest.raises(UserError, match="do not follow the order"):
        Tokenizer(reordered, [(b"a", b"b"), (b"c", b"d")]).to_tiktoken()


BYTES = [bytes([byte]) for byte in range(256)]


@settings(max_examples=200)
@given(st.lists(st.text("abc", min_size=2, max_size=4), max_size=8, unique=True), st.data())
def test_what_tiktoken_cannot_express_is_refused_and_all_else_gives_its_ids(words, data):
    """Vocabularies with tokens that no merge makes, or that their merges make in no text."""
    tokens = [*BYTES, *map(str.encode, words)]
    ways = {t: [(t[:cut], t[cut:]) for cut in range(1, len(t)) if {t[:cut], t[cut:]} <= set(tokens)] for t in tokens}
    merges = [data.draw(st.sampled_from(ways[token])) for token in tokens if ways[token] and data.draw(st.booleans())]
    ours = Tokenizer(dict(enumerate(tokens)), merges)
    texts = ["".join(letters) for size in range(1, 7) for letters in itertools.product("abc", repeat=size)]
    theirs = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=dict(zip(tokens, range(999), strict=False)),
                               special_tokens={})  # fmt: skip
    try:
        live = ours.to_tiktoken()
    except UserError:
        assert any(theirs.encode(text) != ours.encode(text) for text in texts)
    else:
        assert [live.encode(text) for text in texts] == [ours.encode(text) for text in texts]


def test_tokens_that_no_merge_makes_are_refused_where_tiktoken_would_make_them(tmp_path):
    for call in (Tokenizer.to_tiktoken, lambda tokenizer: tokenizer.save_ranks(tmp_path / "x.tiktoken")):
        with pytest.raises(UserError, match="do not make the token b'ab'"):
            call(Tokenizer(dict(enumerate([*BYTES, b"ab"])), []))
    ranks = {token: rank for rank, token in enumerate([*BYTES, b"bc", b"ab", b"abcd", b"\x81ab\xc3"])}
    ours = Tokenizer.from_ranks(ranks)
    assert ours.to_tiktoken().encode("abcd ab abc") == ours.encode("abcd ab abc")


def test_a_missing_package_is_named(monkeypatch):
    for name, call in (("tiktoken", gpt2().to_tiktoken), ("tokenizers", gpt2().to_hf)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=f"needs the package {name}"):
            call()
