"""A tokenizer whose truth is obvious: a token a byte, special tokens from 256 on."""

from groundup.tokenizer import Tokenizer

EOT = "<|endoftext|>"


def byte_tokenizer(*specials: str) -> Tokenizer:
    """Ids 0 … 255 are the bytes; then come the special tokens (default: <|endoftext|>)."""
    return Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], specials or (EOT,))
