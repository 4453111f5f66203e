"""Fourth step: a text of any size, from anything that can be read, in bounded memory.

The parallel trainer seeks, so it needs a file; and each process holds its whole part. Here the text arrives block by
block (a pipe, a compressed file, a file larger than memory). Of each block everything up to its last safe cut
(parallel.py) is counted; the rest waits and is put before the next block. At most two blocks a process are under way,
so memory is bounded by a few blocks and the table of distinct words, which grows far more slowly than the text.

Only a text without any safe cut, such as one endless word, is held whole.

Cost: that of the parallel trainer, and the text travels once to its process.
"""

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from groundup.tokenizer.ladder.incremental import train_on_words
from groundup.tokenizer.ladder.parallel import margin, safe_cuts
from groundup.tokenizer.reference import Merge, count_words

BLOCK_BYTES = 1 << 20
Worker = Callable[[Iterable[str], Sequence[str]], Counter[bytes]]


def train(
    source: Path | BinaryIO,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    processes: int = 0,
    block_bytes: int = BLOCK_BYTES,
    worker: Worker = count_words,
) -> list[Merge]:
    """The merges of a UTF-8 file, or of what an open binary file still holds.

    processes: 0 for one a core. worker: counts in place of `count_words` (the profiler's).
    """
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return train(file, vocab_size, special_tokens, processes, block_bytes, worker)
    words = count_stream(source, special_tokens, processes or os.cpu_count() or 1, block_bytes, worker)
    return train_on_words(words, vocab_size - 256 - len(special_tokens))


def count_stream(
    file: BinaryIO, special_tokens: Sequence[str], processes: int, block_bytes: int, worker: Worker = count_words
) -> Counter[bytes]:
    """How often each pre-token occurs in the rest of the file."""
    total: Counter[bytes] = Counter()
    blocks = ([block.decode()] for block in whole_blocks(file, special_tokens, block_bytes))
    if processes == 1:
        for texts in blocks:
            total.update(worker(texts, special_tokens))
        return total
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = deque()
        for texts in blocks:
            waiting.append(pool.apply_async(worker, (texts, special_tokens)))
            if len(waiting) >= 2 * processes:
                total.update(waiting.popleft().get())
        while waiting:
            total.update(waiting.popleft().get())
    return total


def whole_blocks(file: BinaryIO, special_tokens: Sequence[str], block_bytes: int) -> Iterator[bytes]:
    """The text in blocks that end where a cut changes nothing; each about `block_bytes` long."""
    rest = b""
    searched = 0  # no safe cut stands before this place of the rest
    while block := file.read(block_bytes):
        rest += block
        *_, cut = 0, *safe_cuts(rest, searched, special_tokens)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        searched = max(0, len(rest) - margin(special_tokens))
    if rest:
        yield rest
