"""Text → token directory: `train.npy`, `valid.npy`, their documents' offsets, `meta.json`, `tokenizer.json`.

Documents are read as a stream (corpus.py) and gathered, each with its `<|endoftext|>`, into jobs of about a million
characters; threads encode the jobs (the Rust core releases the interpreter lock), the results are appended in order.
One call encodes a whole job, separators included, so a corpus of short documents costs no call each; where the
documents end is read off the ids. In memory are at most two jobs a thread, whatever the size of the corpus or of
its documents.

Validation is the second group of paths, or a fraction of the documents of the first: a first pass counts them (and
meets invalid bytes before any work is done), and document i is validation if a keyed permutation takes i below the
number wanted. This depends on the number of documents and nothing else, and is exact. A corpus of a single document,
such as one book, is cut in two near its end, at a line's end, as there is no other way to hold text back.

Cost: measured on 99 MB of English with GPT-2's vocabulary, 1.4 s of processor time, of which the encoder takes 0.8;
reading, hashing and writing overlap it on another thread, saving the tokenizer (0.2 s) on a third. The first pass,
where validation is a fraction, reads the text once more (0.4 s).
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.data.corpus import PIECE_CHARS, SEPARATOR, Piece, ReadCounts, Source, find_sources, read_pieces
from groundup.data.dataset import TOKENIZER_FILE, dump_meta, refuse_foreign_directory, token_dtype
from groundup.data.npy import NpyWriter
from groundup.data.permutation import make_key, permute
from groundup.errors import UserError
from groundup.files import directory_written_aside
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.training import available_threads

DEFAULT_VALID_FRACTION = 0.01
_SPLIT_SEED = 0
_FLAG_BLOCK = 4096
_KNOWN_PATTERNS = frozenset({"gpt2", "cl100k", "llama3"})

Paths = str | os.PathLike | Sequence[str | os.PathLike]
Progress = Callable[[int, int], None]
"""progress(bytes read, bytes in all), after each job."""


class _Encoded(NamedTuple):
    ids: np.ndarray
    bytes: int  # UTF-8 bytes of the text, special tokens not counted


@dataclass
class _Job:
    """Text gathered for one call of the encoder: one split's documents, in order."""

    split: str
    parts: list[str] = field(default_factory=list)
    chars: int = 0

    def add(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        self.chars += len(piece.text)
        if piece.ends:
            self.parts.append(SEPARATOR)


class _SplitWriter:
    """The two files of one split, and what meta.json says of them."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, eot_id: int, stack: ExitStack) -> None:
        self.tokens = stack.enter_context(NpyWriter(directory / f"{split}.npy", dtype))
        self.offsets = stack.enter_context(NpyWriter(directory / f"{split}.docs.npy", np.dtype(np.uint64)))
        self.eot_id = eot_id
        self.bytes = 0
        self.next_offset = 0  # of the document being written, or of the next one

    def append(self, encoded: _Encoded) -> None:
        ends = np.flatnonzero(encoded.ids == self.eot_id).astype(np.uint64) + np.uint64(self.tokens.count + 1)
        if len(ends):
            self.offsets.append(np.concatenate([np.array([self.next_offset], dtype=np.uint64), ends[:-1]]))
            self.next_offset = int(ends[-1])
        self.tokens.append(encoded.ids)
        self.bytes += encoded.bytes

    def meta(self) -> dict:
        return {
            "tokens": self.tokens.count,
            "bytes": self.bytes,
            "documents": self.offsets.count,
            "sha256": self.tokens.hexdigest,
        }


def tokenize_corpus(
    train: Paths,
    valid: Paths | None,
    tokenizer: Tokenizer,
    out: str | os.PathLike,
    valid_fraction: float | None = None,
    threads: int = 0,
    errors: str = "strict",
    progress: Progress | None = None,
    text_field: str = "text",
) -> dict:
    """Write the token directory `out` (replaced as a whole, at the end) and return its meta.json's content.

    train, valid: text files and folders. valid_fraction: where `valid` is not given, the part of the documents of
    `train` that becomes validation, at least one document (None: 1%). threads: 0 for all cores. errors: "strict"
    refuses bytes that are not UTF-8, "replace" puts U+FFFD in their place and counts. text_field: the field of a JSON
    line that holds its text.
    """
    eot_id = _check_tokenizer(tokenizer)
    fraction = _check_fraction(valid, valid_fraction)
    out = Path(out).resolve()
    refuse_foreign_directory(out)
    sources = {"train": find_sources(train)}
    if valid is not None:
        sources["valid"] = find_sources(valid)
        _refuse_shared_files(sources)
    counts = ReadCounts()
    reader = _Reader(errors, counts, _piece_chars(tokenizer), text_field)
    how = "files"
    if fraction is None:
        pieces = ((name, piece) for name, group in sources.items() for piece in reader.pieces(_files(group)))
    else:
        how, pieces = _split(reader, _files(sources["train"]), fraction)
    total = sum(source.bytes for group in sources.values() for source in group)
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        with directory_written_aside(out) as aside:
            with ExitStack() as stack:
                beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="save"))
                saved = beside.submit(tokenizer.save_json, aside / TOKENIZER_FILE)
                writers = {split: _SplitWriter(aside, split, dtype, eot_id, stack) for split in ("train", "valid")}
                for split, encoded in _encode(_jobs(pieces), tokenizer, threads):
                    writers[split].append(encoded)
                    if progress is not None:
                        progress(counts.bytes, total)
            for split, group in sources.items():
                if not writers[split].offsets.count:
                    raise UserError(f"{group[0].name}: no text for {split}.npy; name a file with text")
            saved.result()
            meta = _meta(tokenizer, dtype, eot_id, sources, writers, counts, how)
            dump_meta(aside, meta)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); what was there before is kept") from error
    return meta


def _check_tokenizer(tokenizer: Tokenizer) -> int:
    if tokenizer.eot_id is None:
        raise UserError(
            f"the tokenizer has no special token {SEPARATOR}, which ends every document; "
            f"train it with --special-token '{SEPARATOR}'"
        )
    return tokenizer.eot_id


def _check_fraction(valid: Paths | None, fraction: float | None) -> float | None:
    if valid is not None:
        if fraction is not None:
            raise UserError("give validation files or a validation fraction, not both")
        return None
    fraction = DEFAULT_VALID_FRACTION if fraction is None else fraction
    if not 0 < fraction < 1:
        raise UserError(f"the validation fraction is {fraction}; it must be between 0 and 1, such as 0.01")
    return fraction


def _refuse_shared_files(sources: dict[str, list[Source]]) -> None:
    seen = {file.resolve() for file in _files(sources["train"])}
    for file in _files(sources["valid"]):
        if file.resolve() in seen:
            raise UserError(
                f"{file}: given for training and for validation, so validation would measure memory; "
                "name another file, or give the training file alone and a validation fraction"
            )


def _files(sources: Iterable[Source]) -> list[Path]:
    return [file for source in sources for file in source.files]


def _piece_chars(tokenizer: Tokenizer) -> int:
    """Long documents stay whole where a cut could change ids: where a special token holds white space, as it could fall
    into that, and where the pattern is not one of those whose boundaries are known."""
    blank = any(char.isspace() for token in tokenizer.special_tokens for char in token)
    return 1 << 62 if blank or tokenizer.pattern not in _KNOWN_PATTERNS else PIECE_CHARS


@dataclass
class _Reader:
    errors: str
    counts: ReadCounts
    piece_chars: int
    text_field: str

    def pieces(self, files: list[Path], counts: ReadCounts | None = None) -> Iterator[Piece]:
        counts = self.counts if counts is None else counts
        return read_pieces(
            files, errors=self.errors, counts=counts, piece_chars=self.piece_chars, text_field=self.text_field
        )

    def count(self, files: list[Path]) -> tuple[int, int]:
        """(documents, characters) of the files, in a pass of its own."""
        documents = chars = 0
        for piece in self.pieces(files, ReadCounts()):
            documents += piece.ends
            chars += len(piece.text)
        return documents, chars


def _split(reader: _Reader, files: list[Path], fraction: float) -> tuple[str, Iterator[tuple[str, Piece]]]:
    """How the files are split (for meta.json), and their pieces with the name of the split each belongs to."""
    documents, chars = reader.count(files)
    if documents > 1:
        wanted = min(max(1, round(fraction * documents)), documents - 1)
        return "documents", _split_documents(reader.pieces(files), documents, wanted)
    if chars < 2:
        raise UserError(f"{files[0]}: no text to split into training and validation; name a file with text")
    wanted = min(max(1, round(fraction * chars)), chars - 1)
    return "end of the only document", _split_one(reader.pieces(files), chars - wanted, wanted // 2)


def _split_documents(pieces: Iterator[Piece], documents: int, wanted: int) -> Iterator[tuple[str, Piece]]:
    """Document i is validation where the permutation takes i below `wanted`: exactly `wanted` of them are."""
    key = make_key(_SPLIT_SEED, np.zeros(1, dtype=np.uint64))
    flags: deque[bool] = deque()
    done = 0
    for piece in pieces:
        if not flags:
            block = np.arange(done, min(done + _FLAG_BLOCK, documents))
            flags.extend((permute(block, documents, key) < wanted).tolist())
            done += len(block)
        yield ("valid" if flags[0] else "train"), piece
        if piece.ends:
            flags.popleft()


def _split_one(pieces: Iterator[Piece], boundary: int, slack: int) -> Iterator[tuple[str, Piece]]:
    """Cut the only document at the first line end within `slack` of character `boundary`, else right there."""
    passed = 0
    for text, ends in pieces:
        start = boundary - passed
        passed += len(text)
        if not 0 <= start < len(text):
            yield ("valid" if start < 0 else "train"), Piece(text, ends)
            continue
        cut = text.find("\n", start, min(start + slack, len(text) - 1)) + 1 or start
        yield "train", Piece(text[:cut], True)
        yield "valid", Piece(text[cut:], ends)


def _jobs(pieces: Iterable[tuple[str, Piece]]) -> Iterator[_Job]:
    """The pieces of each split, in order, gathered into jobs of at least PIECE_CHARS characters (the last: less)."""
    open_jobs: dict[str, _Job] = {}
    for split, piece in pieces:
        job = open_jobs.setdefault(split, _Job(split))
        job.add(piece)
        if job.chars >= PIECE_CHARS:
            yield open_jobs.pop(split)
    yield from open_jobs.values()


def _encode(jobs: Iterator[_Job], tokenizer: Tokenizer, threads: int) -> Iterator[tuple[str, _Encoded]]:
    """(split, ids) of every job, in the jobs' order; at most two jobs a thread are under way."""
    excess = _special_bytes(tokenizer)
    threads = available_threads(threads)

    def encode(job: _Job) -> _Encoded:
        data = "".join(job.parts).encode()
        ids = tokenizer.encode_numpy(data)
        if np.count_nonzero(ids == tokenizer.eot_id) != job.parts.count(SEPARATOR):
            raise UserError(
                f"a special token overlaps {SEPARATOR} where a document ends; train the tokenizer without it"
            )
        return _Encoded(ids, len(data) - int(excess[ids].sum()))

    waiting: deque[tuple[str, Future[_Encoded]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
    try:
        for job in jobs:
            waiting.append((job.split, pool.submit(encode, job)))
            if len(waiting) >= 2 * threads:
                split, future = waiting.popleft()
                yield split, future.result()
        while waiting:
            split, future = waiting.popleft()
            yield split, future.result()
    finally:  # an error or Ctrl-C: drop what has not begun
        pool.shutdown(wait=True, cancel_futures=True)


def _special_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """uint32 (vocab_size,): a special token's length in bytes at its id, 0 at every other id."""
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.uint32)
    for token, id_ in tokenizer.special_tokens.items():
        lengths[id_] = len(token.encode())
    return lengths


def _meta(
    tokenizer: Tokenizer,
    dtype: np.dtype,
    eot_id: int,
    sources: dict[str, list[Source]],
    writers: dict[str, _SplitWriter],
    counts: ReadCounts,
    how: str,
) -> dict:
    return {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": eot_id,
        "dtype": str(dtype),
        "splits": {split: writer.meta() for split, writer in writers.items()},
        "split_by": how,
        "sources": {
            split: [{"name": s.name, "files": len(s.files), "bytes": s.bytes} for s in group]
            for split, group in sources.items()
        },
        "replaced": counts.replaced,
        "empty_documents": counts.empty,
    }
