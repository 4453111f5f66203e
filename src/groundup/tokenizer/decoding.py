"""Ids → text one token at a time. A token may end inside a character: its bytes wait for the rest."""

import codecs
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def readable(ids: "Iterable[int] | np.ndarray") -> "list[int] | np.ndarray":
    """Ids as the core reads them: an array of uint16 or uint32, where every number survives that, or a list."""
    dtype: Any = getattr(ids, "dtype", None)
    if dtype is not None and not hasattr(dtype, "kind"):  # no array of NumPy: a tensor of torch, on any device
        return ids.tolist()  # pyrefly: ignore[missing-attribute]
    if dtype is None or dtype.kind not in "iu" or not hasattr(ids, "astype"):
        return list(ids)
    if dtype in ("uint16", "uint32"):
        return ids  # pyrefly: ignore[bad-return] (an array)
    array = ids.astype("uint32")
    return array if (array == ids).all() else list(ids)


def decode_stream(tokens: Iterable[bytes], errors: str = "replace") -> Iterator[str]:
    """Text as soon as its characters are complete; joined, it equals `b"".join(tokens).decode("utf-8", errors)`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for token in tokens:
        if text := decoder.decode(token):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest


def decode_offsets(tokens: Iterable[bytes], errors: str = "replace") -> tuple[str, list[int]]:
    """The text, and for each token the index of the character that its first byte belongs to."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    parts: list[str] = []
    offsets: list[int] = []
    done = 0  # characters in `parts`
    for token in tokens:
        text = decoder.decode(token[:1])
        waiting = decoder.getstate()[0]
        # A first byte that completes a character belongs to the last one; else to the one that is under way.
        offsets.append(done + len(text) - (1 if token and text and not waiting else 0))
        text += decoder.decode(token[1:])
        parts.append(text)
        done += len(text)
    parts.append(decoder.decode(b"", final=True))
    return "".join(parts), offsets
