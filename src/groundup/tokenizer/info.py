"""What a tokenizer holds: its size, its longest tokens, how a word is merged, how far it compresses a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from groundup.errors import UserError
from groundup.tokenizer.sources import blocks, is_json_lines
from groundup.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Node:
    """A token of a word: a byte, or two nodes joined by the merge of that rank."""

    token: bytes
    id: int
    rank: int | None = None
    parts: tuple["Node", ...] = ()


def shown(token: bytes) -> str:
    """A token for people: as text, with escapes for what cannot be printed."""
    return repr(token.decode("utf-8", "backslashreplace"))[1:-1].replace("\\\\x", "\\x")


def merge_trees(tokenizer: Tokenizer, word: str) -> list[Node]:
    """The tokens of a word, in order, each with the merges that made it.

    A token is made by the same merges wherever it stands, so each is merged by itself, as the encoder does it: the
    pair with the lowest rank first, of equals the leftmost. Cost: O(n²) in the length of a token.
    """
    ids = {token: number for number, token in sorted(tokenizer.vocab.items(), reverse=True)}
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(tokenizer.merges)))}
    return [_tree(tokenizer.token_bytes(number), number, ids, ranks) for number in tokenizer.encode_ordinary(word)]


def _tree(token: bytes, number: int, ids: dict[bytes, int], ranks: dict[tuple[bytes, bytes], int]) -> Node:
    nodes = [Node(token[i : i + 1], ids[token[i : i + 1]]) for i in range(len(token))]
    while True:
        pairs = [ranks.get((left.token, right.token)) for left, right in pairwise(nodes)]
        known = [rank for rank in pairs if rank is not None]
        if not known:
            break
        rank = min(known)
        place = pairs.index(rank)
        left, right = nodes[place : place + 2]
        made = left.token + right.token
        nodes[place : place + 2] = [Node(made, ids[made], rank, (left, right))]
    # Some vocabularies hold tokens that no merges make, for words that are whole tokens.
    return nodes[0] if len(nodes) == 1 else Node(token, number, None, tuple(nodes))


def draw(node: Node, first: str = "", rest: str = "") -> Iterator[str]:
    """The tree as lines, one a node."""
    made = "byte" if len(node.token) == 1 else "whole" if node.rank is None else f"merge {node.rank}"
    yield f'{first}"{shown(node.token)}"  id {node.id}, {made}'
    for place, part in enumerate(node.parts):
        last = place == len(node.parts) - 1
        yield from draw(part, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))


def as_json(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {"token": shown(node.token), "id": node.id, "merge": node.rank}
    if node.parts:
        found["parts"] = [as_json(part) for part in node.parts]
    return found


def texts(path: Path) -> Iterator[Iterator[bytes]]:
    """The texts of a file, each in blocks: of JSON lines, each line's; what is packed is unpacked, as in training.

    UserError where the file cannot be read or holds nothing. A text must be used up before the next.
    """
    parts = _blocks(path)
    yield from (iter([part]) for part in parts) if is_json_lines(path) else [parts]


def _blocks(path: Path) -> Iterator[bytes]:
    empty = True
    for block, _ in blocks(path, lambda _: None):
        empty = empty and not block
        yield block.encode() if isinstance(block, str) else block
    if empty:
        raise UserError(f"{path}: the file is empty; name a file with text")


def count_tokens(tokenizer: Tokenizer, path: Path) -> tuple[int, int]:
    """(bytes, tokens) of a file's texts, read in blocks."""
    read = 0

    def counted(text: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal read
        for block in text:
            read += len(block)
            yield block

    tokens = sum(1 for text in texts(path) for _ in tokenizer.encode_iterable(counted(text)))
    return read, tokens


def describe(tokenizer: Tokenizer, longest: int, word: str, text: Path | None) -> dict[str, Any]:
    """Everything `groundup tokenizer info` says, as plain data."""
    ordinary = [(number, t) for number, t in tokenizer.vocab.items() if number not in tokenizer.special_tokens.values()]
    by_length = sorted(ordinary, key=lambda item: (-len(item[1]), item[0]))
    found: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "merges": len(tokenizer.merges),
        "special_tokens": tokenizer.special_tokens,
        "pattern": tokenizer.pattern,
        "fingerprint": tokenizer.fingerprint,
        "mean_token_bytes": sum(len(token) for _, token in ordinary) / len(ordinary),
        "longest": [{"token": shown(t), "id": number, "bytes": len(t)} for number, t in by_length[:longest]],
    }
    if word:
        found["word"] = [as_json(node) for node in merge_trees(tokenizer, word)]
    if text is not None:
        size, tokens = count_tokens(tokenizer, text)
        found["text"] = {"file": text.name, "bytes": size, "tokens": tokens, "bytes_per_token": size / tokens}
    return found
