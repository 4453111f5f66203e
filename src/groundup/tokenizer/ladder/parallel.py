"""Third step: count words on all cores. After the incremental trainer, counting is nearly all of the time.

The merge loop needs only the table of distinct words, and tables of parts of a text add up, if the parts are cut where
no word and no special token goes across. Where is that? A piece of GPT-2's pattern may begin with white space, but
never goes from another character to white space. So between a character that is no white space and a space or newline
there always is a boundary, and as no alternative looks back, the text after it is cut as if it stood alone.
`safe_cuts` finds such places, less those inside a special token (which may hold spaces).

Each process reads its own stretch of the file, so that no text travels between processes, only tables of counts.
Processes are spawned, not forked: a fork copies only the calling thread, and a lock that another thread holds at that
moment stays locked for ever in the child.

Cost: about 0.2 s to start a process, then the counting time divided by the number of cores.
"""

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from groundup.tokenizer.ladder.incremental import train_on_words
from groundup.tokenizer.reference import Merge, count_words

WINDOW = 1 << 16
"""Bytes that are read at once when a place to cut is looked for."""

_BLANK = re.compile(rb"[ \n]")


class Part(NamedTuple):
    """A stretch of a file, from byte `start` up to `end`."""

    path: Path
    start: int
    end: int
    special_tokens: Sequence[str]


def count_part(part: Part) -> Counter[bytes]:
    """How often each pre-token occurs in one stretch; what a worker process does."""
    with open(part.path, "rb") as file:
        file.seek(part.start)
        return count_words([file.read(part.end - part.start).decode()], part.special_tokens)


def train(
    path: Path,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    processes: int = 0,
    worker: Callable[[Part], Counter[bytes]] = count_part,
) -> list[Merge]:
    """The merges of a UTF-8 file. processes: 0 for one a core. worker: in place of `count_part` (the profiler's)."""
    processes = processes or os.cpu_count() or 1
    words = count_file(path, special_tokens, processes, worker)
    return train_on_words(words, vocab_size - 256 - len(special_tokens))


def count_file(
    path: Path,
    special_tokens: Sequence[str],
    processes: int,
    worker: Callable[[Part], Counter[bytes]] = count_part,
) -> Counter[bytes]:
    """How often each pre-token occurs in the file."""
    ends = part_ends(path, special_tokens, processes)
    parts = [Part(path, start, end, special_tokens) for start, end in pairwise([0, *ends])]
    total: Counter[bytes] = Counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for words in pool.imap_unordered(worker, parts):
            total.update(words)
    return total


def part_ends(path: Path, special_tokens: Sequence[str], parts: int) -> list[int]:
    """Ends of at most `parts` stretches of the file of about equal size, each at a safe cut."""
    size = path.stat().st_size
    ends: list[int] = []
    with open(path, "rb") as file:
        for part in range(1, parts):
            end = _next_cut(file, max(part * size // parts, ends[-1] if ends else 0), special_tokens)
            if end is not None and end > (ends[-1] if ends else 0):
                ends.append(end)
    return [*ends, size]


def _next_cut(file: BinaryIO, start: int, special_tokens: Sequence[str]) -> int | None:
    """The first safe cut of the file at `start` or later, looked for window by window."""
    spare = margin(special_tokens)
    while True:
        first = max(0, start - spare)
        file.seek(first)
        data = file.read(WINDOW + 2 * spare)
        cut = next(safe_cuts(data, start - first, special_tokens), None)
        if cut is not None:
            return first + cut
        if len(data) < WINDOW + 2 * spare:
            return None
        start += WINDOW


def safe_cuts(data: bytes, start: int, special_tokens: Sequence[str]) -> Iterator[int]:
    """Places ≥ `start` at which the text may be cut, with a margin kept to the end of `data`.

    The margin is there because a special token that begins before the place may end beyond what has been read.
    """
    spare = margin(special_tokens)
    names = [name.encode() for name in special_tokens]
    for found in _BLANK.finditer(data, max(start, 1), max(0, len(data) - spare)):
        at = found.start()
        before = data[max(0, at - 4) : at].decode("utf-8", "ignore")[-1:]
        if not before or before.isspace():
            continue
        if not any(name in data[max(0, at - len(name) + 1) : at + len(name) - 1] for name in names):
            yield at


def margin(special_tokens: Sequence[str]) -> int:
    """At least a character, and the longest special token."""
    return max([4, *(len(name.encode()) for name in special_tokens)])
