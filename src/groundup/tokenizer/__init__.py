"""Text ↔ ids: byte-level BPE. The Rust core `groundup._core` under a Python face.

    tokenizer.py   Tokenizer: train, load, save, encode, decode
    training.py    text → word counts → merges
    sources.py     paths, folders, packed files and JSON lines as text
    formats.py     Hugging Face's tokenizer.json, vocab.json + merges.txt, tiktoken's ranks
    byte_level.py  bytes as printable characters, as those files write them
    allowed.py     which special tokens a text may hold
    normal.py      Unicode's normal form C, where a loaded tokenizer asks for it
    decoding.py    ids → text while they arrive
    reference.py   the trainer and the encoder in plain Python, for readers and tests
    ladder/        the plain trainer made faster step by step, for readers

Imports neither numpy nor torch.
"""

from groundup.tokenizer.tokenizer import END_OF_TEXT, Tokenizer

__all__ = ["END_OF_TEXT", "Tokenizer"]
