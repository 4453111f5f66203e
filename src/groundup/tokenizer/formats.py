"""Tokenizer files: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` + `merges.txt`.

Both are read and written so that `tokenizers.Tokenizer.from_file` gives the same ids as ours. Tokens appear as
printable characters (byte_level.py), in which a space is "Ġ": so no token breaks a line of `merges.txt`, two words
and a space. In `tokenizer.json` each merge is a pair of strings.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundup.errors import UserError
from groundup.tokenizer.byte_level import BYTE_OF, to_bytes, to_characters

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SAME_PATTERNS = {
    "gpt2",
    GPT2_PATTERN,
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
}


@dataclass
class Parts:
    """What makes a tokenizer: tokens by id, merges by rank, special tokens by name, the pattern's name."""

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    special_tokens: dict[str, int] = field(default_factory=dict)
    pattern: str = "gpt2"


def pattern_name(pattern: str) -> str:
    """`"gpt2"` for GPT-2's pattern under any of its spellings."""
    if pattern in _SAME_PATTERNS:
        return "gpt2"
    raise UserError(f'pattern {pattern!r} is not supported: give "gpt2"')


def token_ids(parts: Parts) -> dict[bytes, int]:
    """Ordinary tokens → ids; of several ids with the same bytes, the lowest."""
    specials = set(parts.special_tokens.values())
    ids: dict[bytes, int] = {}
    for number in sorted(parts.vocab, reverse=True):
        if number not in specials:
            ids[parts.vocab[number]] = number
    return ids


def to_json(parts: Parts) -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    ids = token_ids(parts)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = sorted(parts.special_tokens.items(), key=lambda item: item[1])
    vocab = {to_characters(token): number for token, number in sorted(ids.items(), key=lambda item: item[1])}
    for name, number in specials:
        vocab.setdefault(name, number)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in specials],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[to_characters(left), to_characters(right)] for left, right in parts.merges],
        },
    }


def write_files(parts: Parts, directory: Path) -> None:
    """Write the three files into an existing directory."""
    content = to_json(parts)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in content["model"]["merges"])]
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    (directory / "vocab.json").write_text(json.dumps(content["model"]["vocab"], ensure_ascii=False, indent=0), "utf-8")
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")


def read(path: Path) -> Parts:
    """Read a `tokenizer.json`, or a directory with one, or a directory with `vocab.json` (or `encoder.json`) and
    `merges.txt` (or `vocab.bpe`)."""
    if path.is_file():
        return _read_json(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a tokenizer.json or the folder that holds it")
    if (path / "tokenizer.json").is_file():
        return _read_json(path / "tokenizer.json")
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (path / vocab).is_file() and (path / merges).is_file():
            return _read_pair(path / vocab, path / merges)
    raise UserError(f"{path}: holds neither tokenizer.json nor vocab.json with merges.txt")


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error


def _read_json(path: Path) -> Parts:
    content = _load_json(path)
    try:
        model = content["model"]
        if model.get("type", "BPE") != "BPE":
            raise UserError(f"{path}: the model is {model['type']}, not BPE")
        for option in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"):
            if model.get(option):
                raise UserError(f"{path}: model.{option} is {model[option]!r}: only byte-level BPE is supported")
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        added = content.get("added_tokens", [])
        for token in added:
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                raise UserError(f"{path}: special token {token['content']!r} strips its neighbours: not supported")
        specials = {token["content"]: token["id"] for token in added}
        if content.get("normalizer"):
            raise UserError(
                f"{path}: the normalizer {content['normalizer'].get('type')} is not supported: it must be null"
            )
        pattern = _pattern_of(content.get("pre_tokenizer"), path)
        return _parts(model["vocab"], merges, specials, pattern, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a tokenizer.json ({error!r})") from error


def _pattern_of(pre_tokenizer: dict | None, path: Path) -> str:
    """The pattern that a `pre_tokenizer` entry applies."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    last = steps[-1]
    if last.get("type") != "ByteLevel":
        raise UserError(f"{path}: the pre-tokenizer is {last.get('type')}: only ByteLevel is supported")
    if last.get("add_prefix_space"):
        raise UserError(f"{path}: the pre-tokenizer adds a prefix space, which is not supported")
    if len(steps) == 1 and last.get("use_regex", True):
        return "gpt2"
    if len(steps) == 2 and steps[0].get("type") == "Split" and not last.get("use_regex", True):
        return pattern_name(steps[0]["pattern"]["Regex"])
    raise UserError(f"{path}: this combination of pre-tokenizers is not supported")


def _read_pair(vocab_path: Path, merges_path: Path) -> Parts:
    vocab = _load_json(vocab_path)
    if not isinstance(vocab, dict):
        raise UserError(f"{vocab_path}: not a dictionary of tokens")
    try:
        lines = merges_path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{merges_path}: cannot be read ({error})") from error
    body = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#version")]
    for number, line in body:
        if line.count(" ") != 1:
            raise UserError(f"{merges_path}: line {number} is {line!r}: a merge is two tokens and one space")
    merges = [tuple(line.split(" ")) for _, line in body]
    made = {left + right for left, right in merges}
    specials = {token: i for token, i in vocab.items() if token not in made and token not in BYTE_OF}
    return _parts(vocab, merges, specials, "gpt2", vocab_path)


def _parts(vocab: dict[str, int], merges: list, specials: dict[str, int], pattern: str, path: Path) -> Parts:
    """Put together what the files say; tokens of special ids are plain text, all others printable forms."""
    tokens: dict[int, bytes] = {}
    special_ids = set(specials.values())
    try:
        for token, number in vocab.items():
            if number not in special_ids:
                tokens[number] = to_bytes(token)
        pairs = [(to_bytes(left), to_bytes(right)) for left, right in merges]
    except KeyError as error:
        raise UserError(f"{path}: a token holds {error}, which stands for no byte") from error
    except ValueError as error:
        raise UserError(f"{path}: a merge is not two tokens ({error})") from error
    if not tokens:
        raise UserError(f"{path}: the vocabulary is empty")
    tokens.update({number: name.encode() for name, number in specials.items()})
    return Parts(tokens, pairs, specials, pattern)
