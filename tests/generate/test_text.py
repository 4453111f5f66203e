"""Streamed text against decoding everything at once, and the way from a prompt to its continuation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.generate import generate_text, generate_texts, stream_text
from groundup.model import TransformerLM
from groundup.tokenizer import Tokenizer

# Merges that end inside a character: "é" is c3 a9, "日" e6 97 a5, "🙂" f0 9f 99 82.
MERGES = [(b" ", b"\xe6"), (b"\x97", b"\xa5"), (b"\xf0", b"\x9f"), (b"\xa9", b"t"), (b"a", b"\xc3")]
VOCAB = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(MERGES)}
TOKENIZER = Tokenizer(VOCAB, MERGES, ["<|endoftext|>"])
EOT = 261


def text_model(vocab_size: int = 320) -> TransformerLM:
    model = TransformerLM(ModelConfig(vocab_size=vocab_size, context_length=16, d_model=32, n_layers=1, n_heads=2))
    model.init_weights(1)
    return model


@given(st.lists(st.integers(0, EOT), max_size=30))
def test_pieces_joined_equal_the_whole(ids):
    shown = b"".join(VOCAB[i] for i in ids if i != EOT)
    assert "".join(stream_text(TOKENIZER, ids)) == shown.decode("utf-8", errors="replace")


def test_a_piece_appears_as_soon_as_its_character_is_complete():
    ids = [*"é".encode(), *"🙂".encode(), 256, 257, ord("x")]
    arrived, shown = [], []

    def tokens():
        for i in ids:
            arrived.append(i)
            yield i

    for piece in stream_text(TOKENIZER, tokens()):
        shown.append((piece, len(arrived)))
    # " 日" is two tokens, the first of which ends in the character's first byte: the space comes at once.
    assert shown == [("é", 2), ("🙂", 6), (" ", 7), ("日", 8), ("x", 9)]


def test_a_character_cut_by_the_end_is_a_replacement_character():
    assert list(stream_text(TOKENIZER, [ord("a"), 0xF0, 0x9F])) == ["a", "\ufffd"]
    assert list(stream_text(TOKENIZER, [])) == []


def test_the_end_token_is_not_printed():
    assert "".join(stream_text(TOKENIZER, [ord("a"), EOT])) == "a"


def test_a_prompt_is_continued_within_the_tokenizers_vocabulary():
    model = text_model()
    with torch.no_grad():
        model.lm_head.weight[EOT + 1 :] *= 100  # padding that would be drawn if it could
    text = "".join(generate_text(model, TOKENIZER, "def ", 60, temperature=1.0, seed=4))
    assert text
    assert text == "".join(generate_text(model, TOKENIZER, "def ", 60, temperature=1.0, seed=4))


def test_an_empty_prompt_starts_a_document():
    model = text_model()
    empty = "".join(generate_text(model, TOKENIZER, "", 10, temperature=0))
    assert empty == "".join(generate_text(model, TOKENIZER, "<|endoftext|>", 10, temperature=0))
    bare = Tokenizer(VOCAB, MERGES)
    with pytest.raises(UserError, match="the prompt is empty"):
        generate_text(model, bare, "", 10)


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(UserError, match="the tokenizer knows 262 ids and the model 260"):
        generate_text(text_model(260), TOKENIZER, "def ", 10)


def test_texts_of_a_batch_are_those_of_each_prompt_alone():
    model = text_model().double()
    batch = ["def ", "", "a long prompt, longer than the context"]
    alone = ["".join(generate_text(model, TOKENIZER, text, 30, min_p=0.05, seed=3 + i)) for i, text in enumerate(batch)]
    assert generate_texts(model, TOKENIZER, batch, 30, min_p=0.05, seed=3) == alone
