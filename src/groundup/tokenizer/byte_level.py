"""Bytes as printable characters, the way GPT-2's files write tokens (Radford et al. 2019, `encoder.json`).

JSON and text files cannot hold arbitrary bytes, so each byte has a character of its own: the printable ones of
Latin-1 stand for themselves, the others, in ascending order, for U+0100, U+0101, … (space becomes "Ġ", newline "Ċ").
"""

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]

CHARACTER_OF = [chr(b) if b in _PRINTABLE else chr(0x100 + _HIDDEN.index(b)) for b in range(256)]
BYTE_OF = {character: byte for byte, character in enumerate(CHARACTER_OF)}
_TABLE = dict(enumerate(CHARACTER_OF))  # for str.translate, which is quicker than a loop


def to_characters(token: bytes) -> str:
    """A token as its printable form."""
    return token.decode("latin-1").translate(_TABLE)


def to_bytes(token: str) -> bytes:
    """The token of a printable form. Raises KeyError for a character that stands for no byte."""
    return bytes([BYTE_OF[character] for character in token])
