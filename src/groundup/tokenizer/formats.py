"""Tokenizer files: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` + `merges.txt`.

Both are read and written so that `tokenizers.Tokenizer.from_file` gives the same ids as ours. Tokens appear as
printable characters (byte_level.py), in which a space is "Ġ": so no token breaks a line of `merges.txt`, two words
and a space. In `tokenizer.json` each merge is a pair of strings.

The pair of files has no place for a pattern other than GPT-2's and the like; they stand in the first line of
`merges.txt`, after `#version: 0.2`, where other readers skip them.
"""

import json
import warnings
from dataclasses import dataclass, field
from itertools import accumulate
from json.encoder import encode_basestring as _quoted
from pathlib import Path
from typing import Any

from groundup import _core
from groundup.errors import UserError, nearest_name
from groundup.tokenizer.byte_level import BYTE_OF, to_bytes, to_characters

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
LLAMA3_PATTERN = _LLAMA3_WORDS + r"\s*[\r\n]+|\s+(?!\S)|\s+"
# tiktoken's spelling needs possessive quantifiers, which Hugging Face's regex engine reads otherwise.
CL100K_PATTERN = _LLAMA3_WORDS + r"\s+\z|\s*[\r\n]+|\s+(?!\S)|\s+"

_NAMES = {
    GPT2_PATTERN: "gpt2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    LLAMA3_PATTERN: "llama3",
    CL100K_PATTERN: "cl100k",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s": "cl100k",
}
_EXPRESSIONS = {"gpt2": GPT2_PATTERN, "cl100k": CL100K_PATTERN, "llama3": LLAMA3_PATTERN}
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


@dataclass
class Parts:
    """What makes a tokenizer: tokens by id, merges by rank, special tokens by name, the pattern.

    whole_pieces: a pre-token that is a token is not merged. tied_ranks: several merges in a row that make one token
    have one rank (tiktoken ranks tokens, not merges). normalizer: "NFC", or "" for none (normal.py).
    """

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    special_tokens: dict[str, int] = field(default_factory=dict)
    pattern: str = "gpt2"
    whole_pieces: bool = False
    tied_ranks: bool = False
    normalizer: str = ""


def pattern_name(pattern: str) -> str:
    """The name of a pattern that has a scanner of its own, in any of its spellings; else the expression itself."""
    if pattern in _EXPRESSIONS:
        return pattern
    if pattern in _NAMES:
        return _NAMES[pattern]
    if not set(pattern) - _NAME_CHARACTERS:
        raise UserError(f"pattern {pattern!r} is no name of a pattern{nearest_name(pattern, _EXPRESSIONS)}")
    try:
        _core.pre_tokens("", pattern)
    except ValueError as error:
        raise UserError(f"pattern {pattern!r} is not a regular expression ({error})") from error
    return pattern


def expression_of(pattern: str) -> str:
    """The regular expression of a pattern."""
    return _EXPRESSIONS.get(pattern, pattern)


def ranked_merges(parts: Parts) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(left id, right id, rank) of every merge, and the id made by rank."""
    ids = token_ids(parts)
    ranked: list[tuple[int, int, int]] = []
    merged: list[int] = []
    for left, right in parts.merges:
        try:
            made = ids[left + right]
            if not (parts.tied_ranks and merged and merged[-1] == made):
                merged.append(made)
            ranked.append((ids[left], ids[right], len(merged) - 1))
        except KeyError as error:
            raise UserError(
                f"merge {len(ranked)} ({left!r}, {right!r}) needs the token {error}, which the vocabulary lacks"
            ) from error
    return ranked, merged


def token_ids(parts: Parts) -> dict[bytes, int]:
    """Ordinary tokens → ids; of several ids with the same bytes, the lowest."""
    specials = set(parts.special_tokens.values())
    ids: dict[bytes, int] = {}
    for number in sorted(parts.vocab, reverse=True):
        if number not in specials:
            ids[parts.vocab[number]] = number
    return ids


def _spelled(parts: Parts) -> dict[bytes, str]:
    """The printable forms of the ordinary tokens, in the order of ids; translated at once, as a character is a byte."""
    ids = token_ids(parts)
    tokens = sorted(ids, key=ids.__getitem__)
    text = to_characters(b"".join(tokens))
    ends = accumulate(map(len, tokens))
    return {token: text[end - len(token) : end] for token, end in zip(tokens, ends, strict=True)}


def _vocab(parts: Parts, spelled: dict[bytes, str]) -> dict[str, int]:
    ids = token_ids(parts)
    vocab = {form: ids[token] for token, form in spelled.items()}
    for name, number in _specials(parts):
        vocab.setdefault(name, number)
    return vocab


def _specials(parts: Parts) -> list[tuple[str, int]]:
    return sorted(parts.special_tokens.items(), key=lambda item: item[1])


def _frame(parts: Parts) -> dict[str, Any]:
    """The content of `tokenizer.json` without vocabulary and merges, which come last, one after the other."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre_tokenizer: dict[str, Any] = byte_level
    if parts.pattern != "gpt2":
        regex = {"Regex": expression_of(parts.pattern)}
        split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in _specials(parts)],
        "normalizer": {"type": parts.normalizer} if parts.normalizer else None,
        "pre_tokenizer": pre_tokenizer,
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
            "ignore_merges": parts.whole_pieces,
            **({"tied_ranks": True} if parts.tied_ranks else {}),  # other readers skip what they do not know
            "vocab": {},
            "merges": [],
        },
    }


def json_text(parts: Parts) -> str:
    """`tokenizer.json` with a token or merge a line. json's own indentation takes a second for GPT-2's vocabulary; here
    no object is made a merge, as those would set off the garbage collector."""
    spelled = _spelled(parts)
    quoted = {token: _quoted(form) for token, form in spelled.items()}
    merges = ",\n".join([f"[{quoted[left]}, {quoted[right]}]" for left, right in parts.merges])
    frame = json.dumps(_frame(parts), ensure_ascii=False, indent=1)
    end = frame.rindex('{},\n  "merges": []')
    return f'{frame[:end]}{_vocab_text(_vocab(parts, spelled))},\n  "merges": [{merges}]\n }}\n}}\n'


def _vocab_text(vocab: dict[str, int]) -> str:
    lines = ",\n".join([f"{_quoted(token)}: {number}" for token, number in vocab.items()])
    return f"{{{lines}}}"


def spelled_alike(parts: Parts) -> list[str]:
    """The special tokens to which Hugging Face's programs give the id of an ordinary token, as both are one string in
    its files; ours tell them apart."""
    ids = token_ids(parts)
    return [name for name in parts.special_tokens if set(name) <= BYTE_OF.keys() and to_bytes(name) in ids]


def warn_of_alike(parts: Parts) -> None:
    if alike := spelled_alike(parts):
        warnings.warn(
            f"the special tokens {', '.join(map(repr, alike))} are spelled like ordinary tokens: "
            "other programs may confuse them, and vocab.json leaves them out",
            stacklevel=3,
        )


def write_files(parts: Parts, directory: Path) -> None:
    """Write the three files into an existing directory."""
    spelled = _spelled(parts)
    vocab = _vocab(parts, spelled)
    merges = [(spelled[left], spelled[right]) for left, right in parts.merges]
    alike = spelled_alike(parts)
    more: dict[str, Any] = {} if parts.pattern == "gpt2" else {"pattern": parts.pattern}
    more |= {"ignore_merges": True} if parts.whole_pieces else {}
    more |= {"tied_ranks": True} if parts.tied_ranks else {}
    more |= {"normalizer": parts.normalizer} if parts.normalizer else {}
    specials = [name for name in parts.special_tokens if name not in alike]
    if set(_not_made(vocab, merges)) != set(specials):
        more["special_tokens"] = specials
    header = "#version: 0.2" + (f" {json.dumps(more)}" if more else "")
    lines = [header, *(" ".join(merge) for merge in merges)]
    (directory / "tokenizer.json").write_text(json_text(parts), "utf-8")
    (directory / "vocab.json").write_text(_vocab_text(vocab), "utf-8")
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
        normalizer = (content.get("normalizer") or {}).get("type", "")
        if normalizer not in ("", "NFC"):
            raise UserError(f"{path}: the normalizer {normalizer} is not supported: it must be null or NFC")
        pattern = _pattern_of(content.get("pre_tokenizer"), path)
        parts = _parts(model["vocab"], merges, specials, pattern, path)
        parts.whole_pieces = bool(model.get("ignore_merges", False))
        parts.tied_ranks = bool(model.get("tied_ranks", False))
        parts.normalizer = normalizer
        _notice_post_processor(content.get("post_processor"), path)
        return parts
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
    split = len(steps) == 2 and steps[0].get("type") == "Split" and not last.get("use_regex", True)
    if split and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
        return pattern_name(steps[0]["pattern"]["Regex"])
    raise UserError(f"{path}: this combination of pre-tokenizers is not supported")


def _notice_post_processor(processor: dict | None, path: Path) -> None:
    """Warns of one that adds tokens, as encoding does not. ByteLevel's only moves offsets."""
    steps = processor["processors"] if processor and processor["type"] == "Sequence" else [processor or {}]
    for step in steps:
        template = [part for part in step.get("single", []) if "SpecialToken" in part]
        names = [part["SpecialToken"]["id"] for part in template]
        if names or step.get("type", "ByteLevel") not in ("ByteLevel", "TemplateProcessing"):
            what = f"adds {', '.join(names)} to every text" if names else "is not supported"
            warnings.warn(
                f"{path}: the post-processor {step['type']} {what}; encode() does not, so add such ids yourself",
                stacklevel=5,
            )


def _read_pair(vocab_path: Path, merges_path: Path) -> Parts:
    vocab = _load_json(vocab_path)
    if not isinstance(vocab, dict):
        raise UserError(f"{vocab_path}: not a dictionary of tokens")
    try:
        lines = merges_path.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{merges_path}: cannot be read ({error})") from error
    header = lines[0] if lines[0].startswith("#version") else ""
    body = [(number, line) for number, line in enumerate(lines, 1) if line and not (header and number == 1)]
    for number, line in body:
        if line.count(" ") != 1:
            raise UserError(f"{merges_path}: line {number} is {line!r}: a merge is two tokens and one space")
    merges = [tuple(line.split(" ")) for _, line in body]
    try:
        more = json.loads(header[header.index("{") :]) if "{" in header else {}
    except ValueError as error:
        raise UserError(f"{merges_path}: the first line holds no JSON after its version ({error})") from error
    try:
        specials = {name: vocab[name] for name in more.get("special_tokens", _not_made(vocab, merges))}
    except KeyError as error:
        raise UserError(f"{merges_path}: the special token {error} is not in {vocab_path.name}") from error
    parts = _parts(vocab, merges, specials, pattern_name(more.get("pattern", "gpt2")), vocab_path)
    parts.whole_pieces = bool(more.get("ignore_merges", False))
    parts.tied_ranks = bool(more.get("tied_ranks", False))
    parts.normalizer = "NFC" if more.get("normalizer") else ""
    return parts


def _not_made(vocab: dict[str, int], merges: list) -> list[str]:
    """Tokens that are neither bytes nor made by a merge: the special tokens of most vocabularies."""
    made = {"".join(merge) for merge in merges}
    return [token for token in vocab if token not in made and token not in BYTE_OF]


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
