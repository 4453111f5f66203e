"""Files: what others read out of them, what we read of others, what is refused."""

import json
import subprocess
import sys
import warnings

import pytest
import tokenizers
from hypothesis import given, settings
from texts import END, PROSE, gpt2, gpt2_folder, known_to, train_on, weird_text

from groundup.errors import UserError
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.byte_level import to_bytes, to_characters


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(tokenizer, its folder): tokens hold spaces and newlines, many bytes occur in no token."""
    directory = tmp_path_factory.mktemp("trained")
    text = (PROSE + END + "a" * 29 + " " + "a" * 23 + " \n \n\n  \n" * 5) * 4
    tokenizer = train_on(directory, text, 450, special_tokens=[END, END + END, "<pad> x"])
    tokenizer.save(directory / "saved")
    return tokenizer, directory / "saved"


def test_all_files_reload_to_the_same_tokenizer(trained, tmp_path):
    tokenizer, folder = trained
    assert any(b" \n" in token for token in tokenizer.vocab.values())
    assert {file.name for file in folder.iterdir()} == {"tokenizer.json", "vocab.json", "merges.txt"}
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(folder / "tokenizer.json").fingerprint == tokenizer.fingerprint
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", r"#?\p{L}+|\P{L}"])
def test_the_pair_of_files_keeps_the_pattern_and_merges_that_look_like_its_header(tmp_path, pattern):
    text = "#versions #versions #version: #versionsx it's 12345\n" * 9
    tokenizer = train_on(tmp_path, text, 267, pattern=pattern, special_tokens=[END])
    tokenizer.save(tmp_path / "out")
    (tmp_path / "pair").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "pair" / name).write_bytes((tmp_path / "out" / name).read_bytes())
    assert Tokenizer.load(tmp_path / "pair").fingerprint == tokenizer.fingerprint
    if pattern[0] == "#":
        assert any(line.startswith("#version ") for line in (tmp_path / "pair" / "merges.txt").read_text().split("\n"))


def test_saving_replaces_a_folder(trained, tmp_path):
    tokenizer, _ = trained
    gpt2().save(tmp_path / "out")
    tokenizer.save(tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").fingerprint == tokenizer.fingerprint
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def others(trained):
    return tokenizers.Tokenizer.from_file(str(trained[1] / "tokenizer.json"))


@settings(max_examples=300)
@given(weird_text)
def test_tokenizers_gives_the_same_ids(trained, others, text):
    known = known_to("tokenizers", text)
    ids = trained[0].encode(known)
    assert others.encode(known).ids == ids
    assert others.decode(ids, skip_special_tokens=False) == known


def test_tokenizers_gives_the_same_ids_on_long_text_and_from_the_pair_of_files(trained, others):
    tokenizer, folder = trained
    text = (PROSE + END) * 20
    assert others.encode(text).ids == tokenizer.encode(text)
    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    pair = tokenizers.Tokenizer(model)
    pair.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pair.encode(PROSE).ids == tokenizer.encode(PROSE)


def test_a_file_that_tokenizers_wrote(tmp_path):
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    other.train_from_iterator([PROSE] * 3, trainer)
    other.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    assert ours.special_tokens == {END: 0}
    assert ours.encode(PROSE + END) == other.encode(PROSE + END).ids


def test_gpt2s_own_files_in_both_layouts(tmp_path):
    gpt2().save(tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").fingerprint == gpt2().fingerprint
    stored = json.loads((gpt2_folder() / "encoder.json").read_text())
    assert json.loads((tmp_path / "out" / "vocab.json").read_text()) == stored


def test_byte_level_characters_are_those_of_gpt2():
    stored = json.loads((gpt2_folder() / "encoder.json").read_text())
    assert sorted(name for name in stored if len(name) == 1) == sorted(to_characters(bytes([b])) for b in range(256))
    assert to_characters(b" \n\x00") == "ĠĊĀ"
    assert to_bytes(to_characters(bytes(range(256)))) == bytes(range(256))


def test_the_constructor_appends_missing_special_tokens(trained):
    tokenizer, _ = trained
    plain = {number: token for number, token in tokenizer.vocab.items() if number < 447}
    rebuilt = Tokenizer(plain, tokenizer.merges, list(tokenizer.special_tokens))
    assert rebuilt.fingerprint == tokenizer.fingerprint
    again = Tokenizer(tokenizer.vocab, tokenizer.merges, list(tokenizer.special_tokens))
    assert again.fingerprint == tokenizer.fingerprint
    assert Tokenizer(plain, tokenizer.merges, ["a"]).special_tokens == {"a": 447}


def test_the_fingerprint_sees_every_part(trained):
    tokenizer, _ = trained
    vocab, merges, specials = tokenizer.vocab, tokenizer.merges, list(tokenizer.special_tokens)
    variants = [
        tokenizer,
        Tokenizer(vocab, merges[:-1], specials),
        Tokenizer(vocab, [*merges[1:], merges[0]], specials),
        Tokenizer(vocab, merges, specials[:-1]),
        Tokenizer({**vocab, 450: b"new"}, merges, specials),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)


GOOD = {
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {to_characters(bytes([b])): b for b in range(256)}, "merges": []},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model"), "not a tokenizer.json"),
        (lambda c: c.update(normalizer={"type": "NFKC"}), "normalizer NFKC"),
        (lambda c: c.update(pre_tokenizer=None), "only ByteLevel"),
        (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "prefix space"),
        (lambda c: c["model"].update(type="WordPiece"), "WordPiece, not BPE"),
        (lambda c: c["model"].update(unk_token="<unk>"), "unk_token"),
        (lambda c: c["model"]["vocab"].pop("a"), "no token for the byte 0x61"),
        (lambda c: c["model"].update(vocab={}), "vocabulary is empty"),
        (lambda c: c["model"]["vocab"].update({"a b": 256}), "stands for no byte"),
        (lambda c: c["model"]["vocab"].update({"ab": 10**9}), "must be dense"),
        (lambda c: c["model"].update(merges=[["a", "b"]]), "needs the token b'ab'"),
        (lambda c: c["model"].update(merges=["a b c"]), "not two tokens"),
        (lambda c: c["added_tokens"].append({"id": 256, "content": "<m>", "lstrip": True}), "strips its neighbours"),
    ],
)
def test_unusable_tokenizer_json(tmp_path, change, message):
    content = json.loads(json.dumps(GOOD))
    assert Tokenizer.load(_written(tmp_path, content)).vocab_size == 256
    change(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(_written(tmp_path, content))


def _written(folder, content):
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_unusable_paths(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor vocab\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="cannot be read as JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(GOOD["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\na b c\n")
    with pytest.raises(UserError, match="line 3"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").write_text('#version: 0.2 {"pattern": \n')
    with pytest.raises(UserError, match="first line holds no JSON"):
        Tokenizer.load(tmp_path)


def test_importing_the_room_is_light():
    code = "import sys, groundup.tokenizer; print([m for m in ('numpy', 'torch', 'jaxtyping') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_tied_ranks_reload(tmp_path):
    """tiktoken's ranks tie the ways to split a token; a saved tokenizer keeps them, and both readers its ids."""
    ranks = {bytes([b]): b for b in range(256)} | {b"bc": 256, b"ab": 257, b"abc": 258, b"abcbc": 259, b"bca": 260}
    tokenizer = Tokenizer.from_ranks(ranks, {"<|e|>": 261}, pattern="gpt2")
    tokenizer.save(tmp_path / "saved")
    found = [Tokenizer.load(tmp_path / "saved")]
    (tmp_path / "saved" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    found += [Tokenizer.load(tmp_path / "tokenizer.json"), Tokenizer.load(tmp_path / "saved")]
    for other in found:
        assert other._parts == tokenizer._parts
        assert other.encode("abcbcabcab<|e|>bca") == tokenizer.encode("abcbcabcab<|e|>bca")
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 262


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (None, None),
        ({"type": "ByteLevel", "trim_offsets": False}, None),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}, None),
        (
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
            "TemplateProcessing adds <s> to every text",
        ),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "RobertaProcessing"}]},
            "RobertaProcessing is not supported",
        ),
    ],
)
def test_post_processors_are_noticed(tmp_path, processor, words):
    train_on(tmp_path, PROSE, 300).save(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"post_processor": processor}), "utf-8")
    if words is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Tokenizer.load(path)
    else:
        with pytest.warns(UserWarning, match=words):
            Tokenizer.load(path)


def test_special_tokens_that_look_like_the_text_of_the_file(tmp_path):
    tokenizer = train_on(tmp_path, PROSE, 300, special_tokens=['@"', '"vocab": "@"', "@@", '", "a": 1'])
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved")._parts == tokenizer._parts
