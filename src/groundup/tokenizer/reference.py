"""Byte-pair encoding in plain Python: the definition that the Rust core must equal. Read this first.

Training (Sennrich et al. 2016, on bytes as in GPT-2):

1. Cut the text at special tokens, then into pre-tokens (roughly: words with their leading space).
2. Write each distinct pre-token as a list of single bytes and remember how often it occurs.
3. Repeat: count all pairs of adjacent symbols; merge the most frequent pair everywhere. Among equally frequent pairs
   take the greatest, comparing the pairs of byte strings as Python compares tuples.

Encoding a pre-token: start from its bytes; while some adjacent pair is a merge, merge the earliest learned one.

Cost: training counts all pairs before every merge, O(merges × distinct words). The Rust core counts once and
then only follows what each merge changes; both find the same merges in the same order.
"""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

Merge = tuple[bytes, bytes]

# White_Space in Unicode's PropList. Not str.isspace, which also takes U+001C to U+001F.
WHITE_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(0x2000 + i) for i in range(11)
}
CONTRACTIONS = ("'s", "'d", "'m", "'t", "'ll", "'ve", "'re")


def character_class(character: str) -> str:
    """ "L" for letters, "N" for numbers, " " for white space, "." for all else.

    `unicodedata` is as old as the running Python: on code points assigned since, the core (see
    rust/src/unicode_ranges.rs) knows more.
    """
    if character in WHITE_SPACE:
        return " "
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "."


def pre_tokens(text: str) -> Iterator[str]:
    """The pieces of GPT-2's pattern, alternative by alternative:

    `'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`
    """
    start = 0
    while start < len(text):
        end = _contraction(text, start) or _spaced_run(text, start) or _white_space(text, start)
        yield text[start:end]
        start = end


def _contraction(text: str, start: int) -> int | None:
    found = next((c for c in CONTRACTIONS if text.startswith(c, start)), None)
    return start + len(found) if found else None


def _run(text: str, start: int) -> int:
    """End of the run of characters of one class that begins at `start`."""
    end = start
    while end < len(text) and character_class(text[end]) == character_class(text[start]):
        end += 1
    return end


def _spaced_run(text: str, start: int) -> int | None:
    """A run of letters, of numbers or of other characters, after at most one space."""
    first = start + 1 if text[start] == " " else start
    if first == len(text) or character_class(text[first]) == " ":
        return None
    return _run(text, first)


def _white_space(text: str, start: int) -> int:
    """A run of white space, less its last character when something follows and something remains."""
    end = _run(text, start)
    return end - 1 if end < len(text) and end - start > 1 else end


def split_specials(text: str, special_tokens: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(segment, is it a special token): the leftmost special token is cut out first, of several the longest."""
    ordered = sorted(special_tokens, key=len, reverse=True)
    start = at = 0
    while at < len(text):
        special = next((name for name in ordered if text.startswith(name, at)), None)
        if special is None:
            at += 1
            continue
        if at > start:
            yield text[start:at], False
        yield special, True
        start = at = at + len(special)
    if start < len(text):
        yield text[start:], False


def count_words(texts: Iterable[str], special_tokens: Sequence[str] = ()) -> Counter[bytes]:
    """How often each pre-token occurs."""
    words: Counter[bytes] = Counter()
    for text in texts:
        for segment, is_special in split_specials(text, special_tokens):
            if not is_special:
                words.update(piece.encode() for piece in pre_tokens(segment))
    return words


def train(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> list[Merge]:
    """The merges, in the order they are learned; fewer than asked when no pair is left."""
    return train_on_words(count_words(texts, special_tokens), vocab_size - 256 - len(special_tokens))


def train_on_words(words: Counter[bytes], wanted: int) -> list[Merge]:
    """The first `wanted` merges of counted words."""
    symbols = [([bytes([byte]) for byte in word], count) for word, count in words.items()]
    merges: list[Merge] = []
    while len(merges) < wanted:
        pairs: Counter[Merge] = Counter()
        for word, count in symbols:
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        symbols = [(merge_pair(word, best), count) for word, count in symbols]
        merges.append(best)
    return merges


def merge_pair(word: list[bytes], pair: Merge) -> list[bytes]:
    """The word with every occurrence of the pair merged, from left to right."""
    merged: list[bytes] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def encode(
    text: str, vocab: dict[int, bytes], merges: Sequence[Merge], special_tokens: dict[str, int] | None = None
) -> list[int]:
    """Ids of a text; `special_tokens` are names and ids."""
    specials = special_tokens or {}
    id_of = {token: number for number, token in sorted(vocab.items(), reverse=True)}
    rank_of = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    ids: list[int] = []
    for segment, is_special in split_specials(text, list(specials)):
        if is_special:
            ids.append(specials[segment])
            continue
        for piece in pre_tokens(segment):
            ids += [id_of[symbol] for symbol in encode_piece(piece.encode(), rank_of)]
    return ids


def encode_piece(piece: bytes, rank_of: dict[Merge, int]) -> list[bytes]:
    """The symbols of a pre-token: always the earliest merge, of equal ones the leftmost first."""
    symbols = [bytes([byte]) for byte in piece]
    while True:
        known = [pair for pair in itertools.pairwise(symbols) if pair in rank_of]
        if not known:
            return symbols
        symbols = merge_pair(symbols, min(known, key=rank_of.__getitem__))


def decode(ids: Iterable[int], vocab: dict[int, bytes]) -> str:
    """The text of ids; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(vocab[number] for number in ids).decode("utf-8", "replace")
