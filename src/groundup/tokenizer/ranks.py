"""tiktoken's form of a vocabulary: tokens and ranks, which are their ids. A rank file has a line a token.

tiktoken has no merges. It merges any two adjacent tokens that together are a token, the one of the lowest rank first,
and takes a piece that is a token whole.
"""

import base64
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer.formats import Parts, ranked_merges, token_ids
from groundup.tokenizer.reference import encode_piece


def read_ranks(path: Path) -> dict[bytes, int]:
    """A tiktoken rank file: a line a token, base64 and rank."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not a base64 token and a rank") from error
    return ranks


def parts_of_ranks(ranks: dict[bytes, int], special_tokens: dict[str, int], pattern: str) -> Parts:
    """tiktoken merges two tokens whenever together they are a token, the one of the lowest rank first: every way to
    split a token in two is a merge."""
    vocab = {rank: token for token, rank in ranks.items()}
    if len(vocab) < len(ranks):
        raise UserError("two tokens have the same rank: ranks must be distinct")
    for name, number in special_tokens.items():
        if number in vocab:
            raise UserError(f"special token {name!r} has the id {number}, which is the rank of a token")
    merges = [split for _, token in sorted(vocab.items()) for split in _splits(token, ranks)]
    vocab.update({number: name.encode() for name, number in special_tokens.items()})
    return Parts(vocab, merges, dict(special_tokens), pattern, whole_pieces=True, tied_ranks=True)


def _splits(token: bytes, tokens: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to split a token into two tokens."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    return [pair for pair in pairs if pair[0] in tokens and pair[1] in tokens]


def mergeable_ranks(parts: Parts) -> dict[bytes, int]:
    """tiktoken's form: ids as ranks. UserError where it would give other ids: where ids are not in the order of the
    merges, or a token is not what the merges make of its bytes, as tiktoken merges any two tokens that make a token."""
    ids = token_ids(parts)
    made = [ids[left + right] for left, right in parts.merges]
    if any(first > second for first, second in pairwise(made)):
        raise UserError("the ids do not follow the order of the merges: tiktoken cannot express this vocabulary")
    known = set(parts.merges)
    for token in _not_merged(parts, ids):
        splits = _splits(token, ids)
        same = parts.whole_pieces and known.issuperset(splits) and (parts.tied_ranks or len(splits) < 2)
        if not same:
            raise UserError(f"the merges do not make the token {token!r}: tiktoken cannot express this vocabulary")
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _not_merged(parts: Parts, ids: dict[bytes, int]) -> list[bytes]:
    """Tokens whose bytes, by themselves, the merges leave in several pieces."""
    tokens = [parts.vocab.get(number) for number in range(max(parts.vocab) + 1)]
    core = _core.Encoder(tokens, *ranked_merges(parts), [], r"[\s\S]+", False)
    pairs = zip(ids, core.encode_batch(list(ids), False, 1), strict=True)
    several = [token for token, found in pairs if len(found) > 1]  # also tokens that begin or end inside a character
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(parts.merges)))}
    return [token for token in several if len(encode_piece(token, ranks)) > 1]


def rank_lines(parts: Parts) -> bytes:
    """The content of a tiktoken rank file."""
    ranks = mergeable_ranks(parts)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
