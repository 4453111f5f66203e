"""The token directory as a training run opens it, checked against its own meta.json.

    train.npy, valid.npy            ids, uint16 or uint32 by vocabulary; every document ends with <|endoftext|>
    train.docs.npy, valid.docs.npy  uint64, the offset of each document's first token
    meta.json                       tokenizer fingerprint, dtype, counts and SHA-256 of each split, sources
    tokenizer.json                  the tokenizer that wrote the ids

Opening costs a few reads however large the files are: sizes, headers and both ends are checked, not every id.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from groundup.data.npy import open_npy
from groundup.errors import UserError
from groundup.files import write_atomic
from groundup.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
META_FILE = "meta.json"
FORMAT = "groundup-tokens-1"
SPLITS = ("train", "valid")
FILES = {META_FILE, TOKENIZER_FILE, *(f"{split}{kind}.npy" for split in SPLITS for kind in ("", ".docs"))}
_AGAIN = "run `groundup tokenize` again"


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits it (vocab_size ≤ 65536), else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def dump_meta(directory: Path, meta: dict) -> None:
    write_atomic(directory / META_FILE, json.dumps({"format": FORMAT, **meta}, indent=1) + "\n")


@dataclass(frozen=True, eq=False)
class TokenData:
    """An open token directory. The arrays are read-only memory maps."""

    directory: Path
    meta: dict
    """Content of meta.json."""
    train: np.ndarray
    valid: np.ndarray
    """Ids, uint16 or uint32 (n_tokens,)."""
    train_docs: np.ndarray
    valid_docs: np.ndarray
    """uint64 (n_documents,): offset of each document's first token."""

    @classmethod
    def open(cls, directory: str | Path) -> "TokenData":
        """Open and check. Raises UserError where a file is missing, truncated, or at odds with meta.json."""
        directory = Path(directory)
        meta = _load_meta(directory)
        arrays = {}
        for split in SPLITS:
            counts = meta["splits"][split]
            tokens = open_npy(directory / f"{split}.npy", meta["dtype"], counts["tokens"])
            docs = open_npy(directory / f"{split}.docs.npy", "uint64", counts["documents"])
            if not len(docs) or docs[0] != 0 or docs[-1] >= len(tokens) or tokens[-1] != meta["eot_id"]:
                raise UserError(
                    f"{directory / split}.npy: the token file and its documents' offsets disagree; {_AGAIN}"
                )
            arrays |= {split: tokens, f"{split}_docs": docs}
        return cls(directory, meta, **arrays)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that wrote the ids."""
        return self.meta["tokenizer"]

    @property
    def digest(self) -> str:
        """A hash of the tokenizer and of all ids: two directories with the same digest hold the same data."""
        parts = [self.fingerprint, *(self.meta["splits"][split]["sha256"] for split in SPLITS)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    def bytes_per_token(self, split: str = "valid") -> float:
        """UTF-8 bytes of text a token stands for: bits per byte = loss in nats / ln 2 / bytes_per_token."""
        counts = self.meta["splits"][split]
        return counts["bytes"] / counts["tokens"]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved beside the tokens. Raises UserError when it is not the one that wrote them."""
        path = self.directory / TOKENIZER_FILE
        if not path.is_file():
            raise UserError(f"{path}: the file is missing; {_AGAIN}")
        tokenizer = Tokenizer.load(path)
        self.check_tokenizer(tokenizer, str(path))
        return tokenizer

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """int64 (vocab_size + 1,): bytes of text an id stands for; 0 for special tokens and, last, foreign ids."""
        tokenizer = self.tokenizer()
        lengths = np.zeros(tokenizer.vocab_size + 1, dtype=np.int64)
        for number, token in tokenizer.vocab.items():
            lengths[number] = len(token)
        lengths[list(tokenizer.special_tokens.values())] = 0
        return lengths

    def check_tokenizer(self, tokenizer: Tokenizer, where: str = "the tokenizer") -> None:
        """Raise UserError unless `tokenizer` (called `where` in the message) wrote these ids."""
        if tokenizer.fingerprint != self.fingerprint:
            raise UserError(
                f"{where} does not match the tokens in {self.directory}: its fingerprint is "
                f"{tokenizer.fingerprint[:12]}, theirs {self.fingerprint[:12]}; use the tokenizer that wrote "
                "them, or tokenize the text with this one"
            )


def _load_meta(directory: Path) -> dict:
    path = directory / META_FILE
    if not directory.is_dir():
        raise UserError(f"{directory}: no such token directory; make one with `groundup tokenize`")
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory}: no token directory ({META_FILE} is missing); make one with `groundup tokenize`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON; {_AGAIN}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f'{path}: not a token directory of the format "{FORMAT}"; {_AGAIN}')
    try:
        splits = [meta["splits"][split] for split in SPLITS]
        numbers = [s[name] for s in splits for name in ("tokens", "bytes", "documents")]
        numbers += [meta["vocab_size"], meta["eot_id"]]
        texts = [meta["tokenizer"], meta["dtype"], *(s["sha256"] for s in splits)]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: the entry {error} is missing; {_AGAIN}") from error
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(t, str) for t in texts):
        raise UserError(f"{path}: holds a count or a name of the wrong kind; {_AGAIN}")
    if meta["dtype"] != str(token_dtype(meta["vocab_size"])):
        raise UserError(f"{path}: dtype {meta['dtype']} does not fit vocab_size {meta['vocab_size']}; {_AGAIN}")
    return meta
