"""tokenizer.json as Llama 3 and Qwen write it, made small, against `tokenizers` on the same file.

No package ships the real files, so these are built with the real layout: pre-tokenizer and normalizer, merges in every
split of a token (Llama 3), tokens that no merge makes, special tokens with gaps, post-processors.
"""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import PROSE, known_to, train_on, weird_text

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.byte_level import to_characters

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def added(number: int, content: str, special: bool = True) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": number, "content": content, **flags}


def layout(vocab: dict[bytes, int], merges: list[tuple[bytes, bytes]], pattern: str, specials: list[dict]) -> dict:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {to_characters(token): number for token, number in vocab.items()},
            "merges": [" ".join(map(to_characters, merge)) for merge in merges],
        },
    }


def llama3(directory: Path) -> dict:
    """All splits of each token into two tokens are merges, in the order of the tokens; whole words need none."""
    trained = train_on(directory, PROSE * 2, 440, pattern="llama3")
    vocab = {token: number for number, token in trained.vocab.items()}
    for word in (" wholeword", "中文没", " 没有"):
        vocab[word.encode()] = len(vocab)
    merges = [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    specials = [added(len(vocab) + n, name) for n, name in enumerate(names)]
    content = layout(vocab, merges, LLAMA3, specials)
    content["model"]["ignore_merges"] = True
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [len(vocab)], "tokens": ["<|begin_of_text|>"]}
        },
    }
    content["post_processor"] = template
    return content


def qwen(directory: Path) -> dict:
    trained = train_on(directory, PROSE * 2, 440, pattern=QWEN)
    vocab = {token: number for number, token in trained.vocab.items()}
    specials = [added(440, "<|im_start|>"), added(441, "<|im_end|>"), added(442, "<tool_call>", special=False)]
    content = layout(vocab, trained.merges, QWEN, specials)
    content["normalizer"] = {"type": "NFC"}
    return content


@pytest.fixture(scope="module", params=[llama3, qwen])
def pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "tokenizer.json").write_text(json.dumps(request.param(folder)))
    return Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


accents = st.text("eoᄀ\u1161\u0301\u0323\u0338가é>\u212bA \u0344", max_size=12)
markers = ["<|im_start|>", "<|eot_id|>", "<tool_call>", "<|im_", " wholeword", " 没有没有", "中文没"]
texts = st.lists(st.one_of(weird_text, accents, st.sampled_from(markers)), max_size=5).map("".join)


@settings(max_examples=400)
@given(text=texts, data=st.data())
def test_ids_are_those_of_tokenizers(pair, text, data):
    ours, theirs = pair
    known = known_to("tokenizers", text)
    if ours._parts.normalizer:  # normal forms are those of Python's version
        known = "".join(c for c in known if unicodedata.category(c) != "Cn")
    ids = theirs.encode(known, add_special_tokens=False).ids
    assert ours.encode(known) == ids
    assert ours.encode(known.encode()) == ids
    assert ours.encode_numpy(known).tolist() == ids
    assert ours.encode_batch([known, ""]) == [ids, []]
    assert ours.encode(known, set(ours.special_tokens)) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(known)), max_size=6)))
    chunks = [known[start:end] for start, end in zip([0, *cuts], [*cuts, len(known)], strict=True)]
    assert list(ours.encode_iterable(chunks)) == ids
    assert list(ours.encode_iterable(bytes([byte]) for byte in known.encode())) == ids


def test_they_reload_from_our_own_files(pair, tmp_path):
    ours, _ = pair
    ours.save(tmp_path / "out")
    (tmp_path / "files").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "files" / name).write_bytes((tmp_path / "out" / name).read_bytes())
    text = PROSE + "e\u0301 <|im_start|> wholeword 没有 1234<|eot_id|>"
    again = Tokenizer.load(tmp_path / "out")
    assert again.fingerprint == ours.fingerprint
    assert again.encode(text) == ours.encode(text) == Tokenizer.load(tmp_path / "files").encode(text)
    assert ours.to_hf().encode(text).ids == ours.encode(text)


def test_normalisation_leaves_bytes_that_are_no_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(qwen(tmp_path)))
    ours = Tokenizer.load(tmp_path)
    assert ours.decode_bytes(ours.encode(b"\xffe\xcc\x81\xff")) == b"\xff\xc3\xa9\xff"
    with pytest.raises(UserError, match="cannot express the normalizer NFC"):
        ours.to_tiktoken()
    with pytest.raises(UserError, match="lone surrogate"):
        ours.encode("é\ud800")
    with pytest.raises(UserError, match="lone surrogate U\\+D800 at character 1"):
        list(ours.encode_iterable(["a", "é\ud800"]))
