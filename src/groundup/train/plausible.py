"""Whether a validation loss can be true: what the text itself can give, measured without a model.

Two checks. The tokens' own bytes, summed over the split, must be the bytes of text that meta.json counted: ids that
another tokenizer wrote stand for other bytes, and a loss over them is a loss over another text. And no language model
comes far below a compressor: xz needs 2 to 2.5 bits for a byte of English prose, large models 0.5, so a run that needs
less than a tenth of what xz needs has seen its validation text, or does not predict it at all. Rejected: a fixed bound
in bits per byte (a log file or a table is honestly that easy); a bound on the loss a token (it hangs on the tokenizer).
"""

import lzma

import numpy as np

from groundup.data import TokenData
from groundup.train.evaluate import token_bytes

SAMPLE = 1 << 20
"""Bytes of text that are compressed: 0.4 s."""
SHARE = 0.1
"""Of the compressor's bits, what a model can not do with."""
TOLERANCE = 0.1
"""Share by which bytes may differ: a tokenizer that normalises text changes some."""


def foreign_tokens(data: TokenData) -> str | None:
    """A line for people when the validation ids do not stand for the text that meta.json counted."""
    lengths, counted = token_bytes(data), data.meta["splits"]["valid"]["bytes"]
    found = sum(
        int(lengths[np.minimum(data.valid[start : start + SAMPLE], len(lengths) - 1)].sum())
        for start in range(0, len(data.valid), SAMPLE)
    )
    if abs(found - counted) <= TOLERANCE * max(counted, 1):
        return None
    return (
        f"the validation tokens in {data.directory} stand for {found:,} bytes of text, but meta.json counts "
        f"{counted:,}: another tokenizer may have written them; run groundup tokenize again"
    )


def least_bits_per_byte(data: TokenData) -> float:
    """A tenth of what xz needs for a byte of the validation text (its first MiB); 0 where there is no text."""
    vocab = data.tokenizer().vocab
    text = b"".join(vocab.get(token, b"") for token in data.valid[: SAMPLE // 2].tolist())[:SAMPLE]
    return SHARE * 8 * len(lzma.compress(text, preset=6)) / len(text) if text else 0.0
