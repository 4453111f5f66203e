"""Long random comparison with the peers: FUZZ_SECONDS=600 pytest -n 0 -m slow tests/tokenizer/test_fuzz.py

Each property runs on hypothesis' texts for as many seconds as the environment says (10 without). The core's own
properties are in rust/src/tests/fuzz.rs: FUZZ_SECONDS=600 cargo test fuzz.
"""

import os
import time
import unicodedata

import pytest
import regex
import tiktoken
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from texts import END, PROSE, gpt2, train_on, weird_text

from groundup import _core
from groundup.tokenizer import Tokenizer, formats, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "10"))

long_text = st.lists(weird_text, max_size=12).map("".join)


def hold(check, *strategies):
    """Runs `check` on values of the strategies until the time is up."""
    end, rounds = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        quiet = settings(
            max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
        )
        quiet(seed(time.time_ns())(given(*strategies)(check)))()
        rounds += 1
    print(f"{100 * rounds} examples")


def assigned(text):
    """Without the characters that engines with older tables take for something else."""
    return "".join(c for c in text if unicodedata.category(c) != "Cn")


def test_pre_tokens_are_those_of_the_regex_package():
    compiled = {name: regex.compile(formats.expression_of(name).replace(r"\z", r"\Z")) for name in ("gpt2", "llama3")}

    def check(text):
        for name, expression in compiled.items():
            found = [piece.decode() for piece in _core.pre_tokens(text, name)]
            assert found == [match.group() for match in expression.finditer(text)]

    hold(check, long_text)


def test_ids_are_those_of_tiktoken_and_tokenizers():
    tokenizer = gpt2()
    other: tiktoken.Encoding = tokenizer.to_tiktoken()
    third = tokenizer.to_hf()

    def check(text):
        text = assigned(text)
        ids = tokenizer.encode(text)
        assert ids == other.encode(text, allowed_special="all")
        assert ids == third.encode(text).ids
        assert tokenizer.encode_numpy(text).tolist() == ids
        assert tokenizer.decode(ids) == text

    hold(check, long_text)


def test_bytes_come_back_and_streams_equal_the_whole():
    tokenizer = gpt2()

    def check(data, size):
        ids = tokenizer.encode(data)
        assert tokenizer.decode_bytes(ids) == data
        assert list(tokenizer.encode_iterable(data[i : i + size] for i in range(0, len(data), size))) == ids
        assert "".join(tokenizer.decode_iterable(ids)) == data.decode("utf-8", "replace")

    hold(check, st.one_of(st.binary(max_size=400), long_text.map(str.encode)), st.integers(1, 50))


def test_merges_are_those_of_the_reference():
    def check(texts, size):
        texts = [*map(assigned, texts), "ab"]
        found = Tokenizer.train_from_texts(texts, 257 + size, [END], threads=2)
        expected = reference.train(texts, 257 + size, [END])
        assert found.merges == expected

    hold(check, st.lists(weird_text, max_size=5), st.integers(0, 40))


def test_merges_are_those_of_tokenizers(tmp_path):
    import tokenizers

    def check(text, size):
        text = assigned(text) + PROSE
        other = tokenizers.Tokenizer(tokenizers.models.BPE())
        other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        other.train_from_iterator([text], trainer)
        other.save(str(tmp_path / "tokenizer.json"))
        ours = train_on(tmp_path, text, size, ties="huggingface")
        assert ours.merges == Tokenizer.load(tmp_path / "tokenizer.json").merges

    hold(check, long_text, st.integers(257, 400))
