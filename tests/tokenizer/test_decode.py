"""Decoding: batches, streams that never split a character, offsets."""

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import PROSE, gpt2

from groundup.errors import UserError
from groundup.tokenizer.formats import GPT2_PATTERN, token_ids


@pytest.fixture(scope="module")
def theirs() -> tiktoken.Encoding:
    ranks = token_ids(gpt2()._parts)
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})


any_ids = st.lists(st.integers(0, 50256), max_size=40)


@settings(max_examples=300)
@given(any_ids)
def test_a_stream_joined_is_the_whole_whatever_the_bytes(ids):
    for errors in ("replace", "ignore", "backslashreplace"):
        assert "".join(gpt2().decode_iterable(ids, errors)) == gpt2().decode(ids, errors)


def test_a_stream_gives_each_character_at_once_and_never_half_of_one():
    ids = gpt2().encode(PROSE)
    shown = list(gpt2().decode_iterable(ids))
    assert "".join(shown) == PROSE
    assert "\ufffd" not in PROSE
    assert not any("\ufffd" in piece for piece in shown)
    arrived = []
    pieces = gpt2().decode_iterable(arrived.append(i) or i for i in gpt2().encode("a😀b"))
    assert [(piece, len(arrived)) for piece in pieces] == [("a", 1), ("😀", 3), ("b", 4)]
    with pytest.raises(UnicodeDecodeError):
        list(gpt2().decode_iterable(gpt2().encode("😀")[:1], "strict"))
    with pytest.raises(UserError, match="legal ids"):
        list(gpt2().decode_iterable([0, 50257]))


def test_batches_decode_one_by_one():
    texts = [PROSE[i:] for i in range(0, 300, 7)]
    assert gpt2().decode_batch(gpt2().encode_batch(texts)) == texts
    assert gpt2().decode_batch([]) == []
    assert gpt2().decode_batch([[47249]], errors="ignore") == [""]


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_offsets_equal_tiktokens_on_text(theirs, text):
    ids = gpt2().encode(text)
    assert gpt2().decode_with_offsets(ids) == theirs.decode_with_offsets(ids)


def test_offsets_equal_tiktokens_on_prose(theirs):
    ids = gpt2().encode(PROSE)
    assert gpt2().decode_with_offsets(ids) == theirs.decode_with_offsets(ids)


@settings(max_examples=300)
@given(any_ids)
def test_offsets_point_at_the_character_of_the_first_byte(ids):
    """On bytes that are no text too: the plain definition decodes byte by byte."""
    data = b"".join(gpt2().token_bytes(i) for i in ids)
    owner = {}  # byte → index of its character in the decoded text
    index = at = 0
    while at < len(data):
        end = next(e for e in range(at + 1, len(data) + 1) if len(data[at : e + 1].decode("utf-8", "replace")) > 1
                   or e == len(data))  # fmt: skip
        for byte in range(at, end):
            owner[byte] = index
        index, at = index + 1, end
    text, offsets = gpt2().decode_with_offsets(ids)
    assert text == data.decode("utf-8", "replace")
    start = 0
    for number, offset in zip(ids, offsets, strict=True):
        assert offset == owner[start]
        start += len(gpt2().token_bytes(number))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, np.uint64])
def test_numpy_ids_of_every_width(dtype):
    ids = np.array(gpt2().encode(PROSE), dtype)
    assert gpt2().decode(ids) == gpt2().decode(ids.tolist()) == PROSE
    assert gpt2().decode_bytes(ids[::2]) == gpt2().decode_bytes(ids[::2].tolist())
    assert gpt2().decode(ids[:0]) == ""
    half = np.array([gpt2().encode("中")[0]], dtype)
    assert gpt2().decode(half) == gpt2().decode(half.tolist())
    for bad in (50257, 65535):
        with pytest.raises(UserError, match=f"id {bad} is not in the vocabulary"):
            gpt2().decode(np.array([5, bad], dtype))


def test_negative_numpy_ids_are_an_error():
    with pytest.raises(UserError, match="id -1 is not"):
        gpt2().decode(np.array([5, -1]))


def test_tensors_of_ids():
    torch = pytest.importorskip("torch")
    ids = gpt2().encode(PROSE)
    for dtype in (torch.int64, torch.int32, torch.uint16):
        tensor = torch.tensor(ids, dtype=torch.int64).to(dtype)
        assert gpt2().decode(tensor) == gpt2().decode(list(tensor)) == PROSE
        assert gpt2().decode_bytes(tensor[:0]) == b""
    assert gpt2().decode_batch(torch.tensor([ids[:5], ids[5:10]])) == gpt2().decode_batch([ids[:5], ids[5:10]])
    assert "".join(gpt2().decode_iterable(tensor)) == PROSE
    assert gpt2().decode_with_offsets(tensor) == gpt2().decode_with_offsets(ids)
    assert gpt2().token_bytes(tensor[0]) == gpt2().token_bytes(ids[0])
    for bad in (50257, -1, 2**40):
        with pytest.raises(UserError, match=f"id {bad} is not in the vocabulary"):
            gpt2().decode(torch.tensor([5, bad]))
