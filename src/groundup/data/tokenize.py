"""Text → token directory: `train.npy`, `valid.npy`, their documents' offsets, `meta.json`, `tokenizer.json`.

The text is read as blocks of about a megabyte (corpus.py), gathered into jobs; threads check them, split them into
documents, encode those, each with its `<|endoftext|>`, and the results are appended in order. What holds the
interpreter's lock is a loop in C over a block; the core releases it. One call encodes a whole job, separators included,
so a corpus of short documents costs no call each; where the documents end is read off the ids. In memory are at most
two jobs a thread and two more, which the number of threads makes smaller, whatever the size of the corpus or of its
documents.

Validation is the second group of paths, or a fraction of the documents of the first: a first pass counts them, on the
same threads (and meets invalid bytes before any work is done), and document i is validation if a keyed permutation
takes i below the number wanted. This depends on the number of documents and nothing else, and is exact. A corpus of a
single document, such as one book, is cut in two at the end of a line near its own.

Cost: measured on 99 MB of English with GPT-2's vocabulary, 0.95 s of processor time, of which the encoder takes 0.61
and saving the tokenizer, beside it, 0.15; reading, splitting, hashing and writing take the rest. The first pass, where
validation is a fraction, reads the text once more (0.1 s).
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from groundup.data.corpus import SEPARATOR, Block, ReadCounts, read_blocks
from groundup.data.dataset import FILES, TOKENIZER_FILE, dump_meta, token_dtype
from groundup.data.npy import NpyWriter
from groundup.data.permutation import make_key, permute
from groundup.errors import UserError
from groundup.files import check_replaceable, directory_written_aside
from groundup.tokenizer import Tokenizer
from groundup.tokenizer.sources import find_sources
from groundup.tokenizer.training import Progress, available_threads

DEFAULT_VALID_FRACTION = 0.01
JOB_BYTES = 1 << 20
# Text of the jobs that wait, run or are done but not written. The process takes several times as much: copies, ids, and
# what each thread's part of the heap keeps.
_WAITING_BYTES = 6 << 20
_JOBS_A_FLUSH = 32
_SEPARATOR = SEPARATOR.encode()
_SPLIT_SEED = 0
_KNOWN_PATTERNS = frozenset({"gpt2", "cl100k", "llama3"})

Paths = str | os.PathLike | Sequence[str | os.PathLike]
_Tell = Callable[[str, int], None]  # (phase, bytes of the files read)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Job:
    """Blocks of text for one thread. `split` "": each document belongs to a split of its own."""

    split: str
    blocks: list[Block]
    read: int
    """Bytes of the files that have been read by its end."""
    first: int = 0
    """Number of the document that it begins with, where documents are counted."""


class _Ids(NamedTuple):
    """What one job adds to one split."""

    split: str
    ids: np.ndarray
    ends: np.ndarray
    """Places of the <|endoftext|> among the ids."""
    bytes: int
    """UTF-8 bytes of the text, special tokens not counted."""


class _Encoded(NamedTuple):
    parts: list[_Ids]
    empty: int
    replaced: int


class _SplitWriter:
    """The two files of one split, and what meta.json says of them."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, stack: ExitStack) -> None:
        self.tokens = stack.enter_context(NpyWriter(directory / f"{split}.npy", dtype))
        self.offsets = stack.enter_context(NpyWriter(directory / f"{split}.docs.npy", np.dtype(np.uint64)))
        self.bytes = 0
        self.next_offset = 0  # of the document being written, or of the next one

    def append(self, part: _Ids) -> None:
        if len(part.ends):
            ends = part.ends.astype(np.uint64) + np.uint64(self.tokens.count + 1)
            self.offsets.append(np.concatenate([np.array([self.next_offset], dtype=np.uint64), ends[:-1]]))
            self.next_offset = int(ends[-1])
        self.tokens.append(part.ids)
        self.bytes += part.bytes

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
    refuses bytes that are not UTF-8, "replace" puts U+FFFD in their place and counts. progress: called after each job
    with (phase, bytes read, bytes in all): "split" while documents are counted to take validation from them, "encode".
    text_field: the field of a JSON line that holds its text.
    """
    fraction = _checked(tokenizer, valid, valid_fraction)
    out = Path(out).resolve()
    check_replaceable(out, FILES, "tokenize")
    sources = {"train": find_sources(train)} | ({} if valid is None else {"valid": find_sources(valid)})
    files = {split: [file for source in group for file in source.files] for split, group in sources.items()}
    _refuse_shared(files["train"], files.get("valid", []))
    total = sum(source.bytes for group in sources.values() for source in group)

    def tell(phase: str, read: int) -> None:
        if progress:
            progress(phase, read, total)

    threads = available_threads(threads)
    counts = ReadCounts()
    job_bytes = max(1, min(JOB_BYTES, _WAITING_BYTES // _most_waiting(threads)))
    reader = _Reader(errors, counts, _cuts_long(tokenizer), text_field, threads, tell, job_bytes)
    if valid is None:
        how, choice, jobs = _split(reader, files["train"], fraction)
    else:
        how, choice, jobs = "files", None, (job for split in files for job in reader.jobs(files[split], split))
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        with directory_written_aside(out) as aside:
            with ExitStack() as stack:
                stack.enter_context(_lock_handed_on())
                beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="save"))
                saved = beside.submit(tokenizer.save_json, aside / TOKENIZER_FILE)
                fingerprint = beside.submit(lambda: tokenizer.fingerprint)
                writers = {split: _SplitWriter(aside, split, dtype, stack) for split in ("train", "valid")}
                encoded = _in_order(_Encoder(tokenizer, errors, choice), jobs, threads)
                _write(encoded, writers, counts, beside, tell)
            for split, group in sources.items():
                if not writers[split].offsets.count:
                    raise UserError(f"{group[0].name}: no text for {split}.npy; name a file with text")
            saved.result()
            meta = {
                "tokenizer": fingerprint.result(),
                "vocab_size": tokenizer.vocab_size,
                "eot_id": tokenizer.eot_id,
                "dtype": str(dtype),
                "splits": {split: writer.meta() for split, writer in writers.items()},
                "split_by": how,
                "sources": {split: [source.meta() for source in group] for split, group in sources.items()},
                "replaced": counts.replaced,
                "empty_documents": counts.empty,
            }
            dump_meta(aside, meta)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); what was there before is kept") from error
    return meta


def _write(
    encoded: Iterator[tuple[int, _Encoded]],
    writers: dict[str, _SplitWriter],
    counts: ReadCounts,
    beside: ThreadPoolExecutor,
    tell: _Tell,
) -> None:
    """Append every job's ids. They are flushed to disk on the way, beside everything else, not all at the end."""
    flushed: Future[None] | None = None
    for number, (read, (parts, empty, replaced)) in enumerate(encoded, 1):
        for part in parts:
            writers[part.split].append(part)
        counts.empty += empty
        counts.replaced += replaced
        tell("encode", read)
        if number % _JOBS_A_FLUSH == 0 and (flushed is None or flushed.done()):
            flushed = beside.submit(writers["train"].tokens.sync)
    if flushed is not None:
        flushed.result()
    tell("encode", counts.bytes)


@contextmanager
def _lock_handed_on() -> Generator[None]:
    """Threads hand the interpreter's lock on after 0.2 ms, not 5: while the tokenizer is saved, which is Python, the
    threads that encode would wait longer for the lock than they work."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _checked(tokenizer: Tokenizer, valid: Paths | None, fraction: float | None) -> float:
    """The fraction to hold back where `valid` is not given. Raises UserError for what cannot be."""
    if tokenizer.eot_id is None:
        raise UserError(
            f"the tokenizer has no special token {SEPARATOR}, which ends every document; "
            f"train it with --special-token '{SEPARATOR}'"
        )
    if valid is not None and fraction is not None:
        raise UserError("give validation files or a validation fraction, not both")
    fraction = DEFAULT_VALID_FRACTION if fraction is None else fraction
    if not 0 < fraction < 1:
        raise UserError(f"the validation fraction is {fraction}; it must be between 0 and 1, such as 0.01")
    return fraction


def _refuse_shared(train: list[Path], valid: list[Path]) -> None:
    seen = {file.resolve() for file in train}
    for file in valid:
        if file.resolve() in seen:
            raise UserError(
                f"{file}: given for training and for validation, so validation would measure memory; "
                "name another file, or give the training file alone and a validation fraction"
            )


def _cuts_long(tokenizer: Tokenizer) -> bool:
    """Long documents stay whole where a cut could change ids: where a special token holds white space, as it could fall
    into that, and where the pattern is not one of those whose boundaries are known."""
    blank = any(char.isspace() for token in tokenizer.special_tokens for char in token)
    return not blank and tokenizer.pattern in _KNOWN_PATTERNS


@dataclass
class _Reader:
    errors: str
    counts: ReadCounts
    cuts_long: bool
    text_field: str
    threads: int
    tell: _Tell
    job_bytes: int

    def jobs(self, files: list[Path], split: str = "", counts: ReadCounts | None = None) -> Iterator[_Job]:
        """The text in order, gathered into jobs of at least `job_bytes` (the last: less)."""
        counts = self.counts if counts is None else counts
        least = self.job_bytes
        how = {"errors": self.errors, "block_bytes": least, "piece_bytes": least if self.cuts_long else 1 << 62}
        blocks: list[Block] = []
        size = 0
        for block in read_blocks(files, counts=counts, text_field=self.text_field, **how):
            blocks.append(block)
            size += len(block.text)
            if size >= least:
                yield _Job(split, blocks, counts.bytes)
                blocks, size = [], 0
        if blocks:
            yield _Job(split, blocks, counts.bytes)

    def count(self, files: list[Path]) -> list[int]:
        """How many documents end in each job, in a pass of its own."""

        def ended(job: _Job) -> int:
            found = [block.documents(self.errors) for block in job.blocks]
            return sum(len(documents.texts) - documents.unfinished for documents in found)

        numbers = []
        for read, number in _in_order(ended, self.jobs(files, counts=ReadCounts()), self.threads):
            self.tell("split", read)
            numbers.append(number)
        return numbers


class _Choice(NamedTuple):
    """Document i is validation where the permutation takes i below `wanted`: exactly `wanted` of them are."""

    documents: int
    wanted: int

    def splits(self, first: int, count: int) -> list[str]:
        key = make_key(_SPLIT_SEED, np.zeros(1, dtype=np.uint64))
        chosen = permute(np.arange(first, first + count), self.documents, key) < self.wanted
        return ["valid" if valid else "train" for valid in chosen.tolist()]


def _split(reader: _Reader, files: list[Path], fraction: float) -> tuple[str, _Choice | None, Iterator[_Job]]:
    """How the files are split (for meta.json), by what, and the jobs."""
    counted = reader.count(files)
    documents = sum(counted)
    if documents < 2:
        # Where it is cut depends on the pieces, so they must not depend on the threads.
        return "end of the only document", None, _split_one(replace(reader, job_bytes=JOB_BYTES), files, fraction)
    wanted = min(max(1, round(fraction * documents)), documents - 1)
    return "documents", _Choice(documents, wanted), _numbered(reader.jobs(files), counted)


def _numbered(jobs: Iterator[_Job], counted: list[int]) -> Iterator[_Job]:
    first = 0
    for place, job in enumerate(jobs):
        if place == len(counted):
            raise UserError("the text grew while it was read; wait for whoever writes it, and run again")
        yield replace(job, first=first)
        first += counted[place]


def _split_one(reader: _Reader, files: list[Path], fraction: float) -> Iterator[_Job]:
    """Cut the only document at the wanted character or, within half the validation text behind it, at a line's end."""
    pieces = _pieces(reader, reader.jobs(files, counts=ReadCounts()), ReadCounts())
    chars = sum(len(block.text.decode()) for _, block in pieces)
    if chars < 2:
        raise UserError(f"{files[0]}: no text to split into training and validation; name a file with text")
    wanted = min(max(1, round(fraction * chars)), chars - 1)
    start = chars - wanted
    for job, block in _pieces(reader, reader.jobs(files), reader.counts):
        text = block.text.decode()
        if 0 <= start < len(text):
            cut = text.find("\n", start, min(start + wanted // 2, len(text) - 1)) + 1 or start
            yield _Job("train", [block._replace(text=text[:cut].encode(), ends=True)], job.read)
            yield _Job("valid", [block._replace(text=text[cut:].encode())], job.read)
        else:
            yield _Job("valid" if start < 0 else "train", [block], job.read)
        start -= len(text)


def _pieces(reader: _Reader, jobs: Iterator[_Job], counts: ReadCounts) -> Iterator[tuple[_Job, Block]]:
    """The pieces of the only document, each as a block, with the job it comes from."""
    for job in jobs:
        for block in job.blocks:
            texts, unfinished, empty, replaced = block.documents(reader.errors)
            counts.empty += empty
            counts.replaced += replaced
            for text in texts:
                yield job, block._replace(text=text, inside=True, ends=not unfinished)


def _most_waiting(threads: int) -> int:
    return 2 * threads + 2


def _in_order(work: Callable[[_Job], _T], jobs: Iterator[_Job], threads: int) -> Iterator[tuple[int, _T]]:
    """What the work makes of every job, on threads, in the jobs' order, after the bytes that had been read by its end.
    A job's text is forgotten as soon as the work is done."""
    waiting: deque[tuple[int, Future[_T]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
    try:
        for job in jobs:
            waiting.append((job.read, pool.submit(work, job)))
            if len(waiting) >= _most_waiting(threads):
                read, future = waiting.popleft()
                yield read, future.result()
        while waiting:
            read, future = waiting.popleft()
            yield read, future.result()
    finally:  # an error or Ctrl-C: drop what has not begun
        pool.shutdown(wait=True, cancel_futures=True)


class _Encoder:
    """The ids of a job."""

    def __init__(self, tokenizer: Tokenizer, errors: str, choice: _Choice | None) -> None:
        self.tokenizer, self.errors, self.choice = tokenizer, errors, choice
        self.lowest_special = min(tokenizer.special_tokens.values())
        self.special_bytes = np.zeros(tokenizer.vocab_size, dtype=np.uint32)
        """A special token's length in bytes at its id, 0 at every other id."""
        for token, id_ in tokenizer.special_tokens.items():
            self.special_bytes[id_] = len(token.encode())

    def __call__(self, job: _Job) -> _Encoded:
        parts: dict[str, list[bytes]] = {}
        ended = {"train": 0, "valid": 0}
        empties = replacements = 0
        first = job.first
        for block in job.blocks:
            texts, unfinished, empty, replaced = block.documents(self.errors)
            empties += empty
            replacements += replaced
            splits = self.choice.splits(first, len(texts)) if self.choice else [job.split] * len(texts)
            first += len(texts) - unfinished
            for split in set(splits):
                mine = [text for text, other in zip(texts, splits, strict=True) if other == split]
                ended[split] += len(mine) - unfinished
                parts.setdefault(split, []).append(_SEPARATOR.join(mine if unfinished else [*mine, b""]))
        return _Encoded([self._ids(*part, ended[part[0]]) for part in parts.items()], empties, replacements)

    def _ids(self, split: str, texts: list[bytes], documents: int) -> _Ids:
        data = b"".join(texts)
        ids = self.tokenizer.encode_numpy(data)
        ends = np.flatnonzero(ids == self.tokenizer.eot_id)
        if len(ends) != documents:
            raise UserError(
                f"a special token overlaps {SEPARATOR} where a document ends; train the tokenizer without it"
            )
        special = self.special_bytes[ids[ids >= self.lowest_special]]
        return _Ids(split, ids, ends, len(data) - int(special.sum()))
