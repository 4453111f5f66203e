"""Unicode's normal form C before encoding, as Qwen's tokenizers ask for: "e" + U+0301 and "é" get the same ids.

Special tokens are cut out first and stay as they are. A text that arrives in chunks is normalised up to its last
ASCII character that no special token could cover: an ASCII character begins a normal form of its own, as it never
combines with what stands before it (UAX #15). Bytes that are not UTF-8 stay as they are.

Cost: a quick check over the text, which nearly always finds it in normal form already.
"""

import unicodedata
from collections.abc import Collection, Iterable, Iterator

from groundup.tokenizer.allowed import split_at


def nfc(text: str | bytes, special_tokens: Collection[str]) -> str | bytes:
    """The text in normal form C, but for its special tokens."""
    return _nfc_bytes(text, special_tokens) if isinstance(text, bytes) else _nfc_text(text, special_tokens)


def _nfc_text(text: str, special_tokens: Collection[str]) -> str:
    if unicodedata.is_normalized("NFC", text):
        return text
    parts = split_at(text, special_tokens)
    return "".join(special or unicodedata.normalize("NFC", str(part)) for part, special in parts)


def _nfc_bytes(data: bytes, special_tokens: Collection[str]) -> bytes:
    if data.isascii():
        return data
    # Surrogates stand for the bytes that are not UTF-8; normalisation leaves them alone.
    return _nfc_text(data.decode("utf-8", "surrogateescape"), special_tokens).encode("utf-8", "surrogateescape")


def nfc_chunks(chunks: Iterable[bytes], special_tokens: Collection[str]) -> Iterator[bytes]:
    """The normal form of a text that arrives in chunks, in other chunks."""
    names = [name.encode() for name in special_tokens]
    longest = max(map(len, names), default=1)
    rest = b""
    searched = 0  # there is no cut before this place of the rest
    for chunk in chunks:
        rest += chunk
        cut = _last_cut(rest, searched, longest, names)
        if cut:
            yield _nfc_bytes(rest[:cut], special_tokens)
            rest = rest[cut:]
        searched = max(0, len(rest) - longest)
    if rest:
        yield _nfc_bytes(rest, special_tokens)


def _last_cut(data: bytes, start: int, longest: int, names: list[bytes]) -> int:
    """The last ASCII character at `start` or later that is not inside a special token, begun ones included; 0: none."""
    for at in range(len(data) - longest, max(start, 1) - 1, -1):
        if data[at] < 0x80 and not any(name in data[max(0, at - len(name) + 1) : at + len(name) - 1] for name in names):
            return at
    return 0
