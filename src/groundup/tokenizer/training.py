"""Training: text → word counts → merges, in the Rust core, with errors a user understands.

Two phases. "count" reads the text, cuts it at special tokens and into pre-tokens, and counts each distinct one, on all
threads (plain files memory-mapped; what is unpacked or comes from an iterator is handed to them in blocks); "merge"
runs the merge loop over the counted words. Memory: the table of distinct words, which `memory` bounds, and the words
laid out for the merge loop.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from groundup import _core
from groundup.errors import UserError
from groundup.tokenizer.sources import JsonLines, blocks, is_plain, text_files

Progress = Callable[[str, int, int], None]
"""Called about ten times a second with (phase, done, total): bytes while "count", merges while "merge"; and at the end
of both, when done is total. Of the texts of an iterator the total is not known before: until then it is 0."""

Merges = list[tuple[bytes, bytes]]

# The threads' tables, growing and pruning take five times the bound of the table; the merge loop needs the words in
# another form (thirteen bytes for one of a long word, which is why the core counts those twice).
_TABLE_SHARE = 8

# Files mapped at a time: Linux allows a process some 65,000 mappings.
_MAPPED = 1 << 14


def available_threads(threads: int) -> int:
    """`threads`, or with 0 the number of cores that this process may use."""
    if threads < 0:
        raise UserError(f"threads is {threads}: give a positive number, or 0 for all cores")
    return threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def merges_wanted(vocab_size: int, special_tokens: Sequence[str]) -> int:
    """Number of merges that fill a vocabulary of 256 bytes and the special tokens."""
    check_special_tokens(special_tokens)
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens "
            f"need at least {least}"
        )
    if vocab_size > _core.MOST_IDS:
        raise UserError(f"vocab_size {vocab_size} is too large: the encoder takes at most {_core.MOST_IDS} ids")
    return vocab_size - least


def check_special_tokens(special_tokens: Iterable[str]) -> None:
    """Special tokens are distinct, not empty and well-formed text."""
    if isinstance(special_tokens, str):
        raise UserError(f"special_tokens is the text {special_tokens!r}: give a list, [{special_tokens!r}]")
    seen = set()
    for name in special_tokens:
        if not name:
            raise UserError("a special token is empty: leave it out")
        if name in seen:
            raise UserError(f"special token {name!r} is given twice: leave one out")
        seen.add(name)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"special token {name!r} holds a lone surrogate: it is no text") from error


@dataclass(frozen=True)
class Options:
    """How to train. The fields are described at `Tokenizer.train`."""

    special_tokens: Sequence[str]
    pattern: str
    threads: int = 0
    errors: str = "strict"
    ties: str = "greatest"
    memory: int = 0
    prune: bool = False
    progress: Progress | None = None
    text_field: str = "text"

    def __post_init__(self) -> None:
        if self.errors not in ("strict", "replace"):
            raise UserError(f'errors is {self.errors!r}: give "strict" or "replace"')
        if self.ties not in ("greatest", "huggingface"):
            raise UserError(f'ties is {self.ties!r}: give "greatest" or "huggingface"')
        if self.prune and not self.memory:
            raise UserError("prune needs a bound: give memory as well")
        if self.memory < 0:
            raise UserError(f"memory is {self.memory}: give a number of bytes, or 0 for no bound")

    def counter(self, threads: int) -> _core.WordCounter:
        bound = max(self.memory // _TABLE_SHARE, 1) if self.memory else 2**63
        names = [name.encode() for name in self.special_tokens]
        return _core.WordCounter(names, self.errors == "replace", self.pattern, bound, self.prune, threads)


def count_files(inputs: Iterable[str | os.PathLike], options: Options) -> _core.WordCounter:
    """The word counts of files and folders."""
    files = text_files(inputs)
    counter = options.counter(available_threads(options.threads))
    plain = [file for file in files if is_plain(file)]
    total = sum(file.stat().st_size for file in files)
    for start in range(0, len(plain), _MAPPED):
        _count_plain(counter, plain[start : start + _MAPPED], total, options)
    done = sum(file.stat().st_size for file in plain)
    tell = _teller(options, total)
    for file in files:
        if not is_plain(file):
            lines = JsonLines(file, options.text_field, options.errors)
            _feed(counter, blocks(file, lambda at: tell(done + at), lines), str(file), options)  # noqa: B023
            if lines.replaced:
                warnings.warn(f"{file}: {lines.replaced} invalid UTF-8 sequences were read as U+FFFD", stacklevel=4)
            done += file.stat().st_size
    if options.progress:
        options.progress("count", total, total)
    return counter


def _count_plain(counter: _core.WordCounter, files: list[Path], total: int, options: Options) -> None:
    try:
        counter.count_files(files, total, options.progress)
    except UnicodeDecodeError as error:
        raise _not_utf8(str(files[int(error.object)]), error.start) from error
    except OSError as error:
        raise UserError(f"{error}; check the path and its permissions") from error
    except (MemoryError, ValueError) as error:
        raise _counting_failed(error, options) from error


def count_texts(texts: Iterable[str | bytes], options: Options) -> _core.WordCounter:
    """The word counts of texts, each a document of its own."""
    if isinstance(texts, (str, bytes)):
        raise UserError("texts is a single text: give a list or an iterator of texts")
    counter = options.counter(available_threads(options.threads))
    tell = _teller(options, 0)

    def parts() -> Iterator[tuple[str | bytes, bool]]:
        for text in texts:
            yield text, True
            tell(counter.done())

    _feed(counter, parts(), "a text", options)
    if options.progress:
        options.progress("count", counter.totals()[1], counter.totals()[1])
    return counter


def _teller(options: Options, total: int) -> Callable[[int], None]:
    """Says how far counting is, ten times a second at most."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if options.progress and time.monotonic() - last >= 0.1:
            last = time.monotonic()
            options.progress("count", done, total)

    return tell


def count_words(words: Mapping[str | bytes, int], options: Options) -> _core.WordCounter:
    """Counts that were made elsewhere."""
    counter = options.counter(1)
    names = re.compile(b"|".join(re.escape(name.encode()) for name in options.special_tokens) or b"(?!)")
    total = 0
    for word, count in words.items():
        data = word.encode() if isinstance(word, str) else word
        total += count * len(data)
        if count < 0 or total >= 2**62:
            raise UserError(f"word {word!r} has the count {count}: counts are positive, and below 2^62 in all")
        if found := names.search(data):
            raise UserError(f"word {word!r} holds the special token {found[0].decode()!r}: cut texts at them first")
        if count:
            counter.add_word(data, count)
    return counter


def _feed(counter: _core.WordCounter, parts: Iterable[tuple], name: str, options: Options) -> None:
    """Counts parts of texts, each with whether a text ends there. What the iterator raises passes as it is."""

    def core(call: Callable, *arguments: str | bytes) -> None:
        try:
            call(*arguments)
        except UnicodeDecodeError as error:
            raise _not_utf8(name, error.start) from error
        except UnicodeEncodeError as error:
            raise UserError(f"{name} holds a lone surrogate at character {error.start}: it is no text") from error
        except (MemoryError, ValueError) as error:
            raise _counting_failed(error, options) from error

    for part, ends in parts:
        core(counter.feed, part)
        if ends:
            core(counter.end_text)
    core(counter.finish)


def _not_utf8(name: str, offset: int) -> UserError:
    return UserError(
        f"{name}: invalid UTF-8 at byte {offset}; mend the file, or replace such bytes with errors=replace"
    )


def _counting_failed(error: Exception, options: Options) -> UserError:
    if isinstance(error, MemoryError):
        what, advice = error.args
        return UserError(f"{what} needs more than the {options.memory} bytes of memory allowed; allow more, {advice}")
    return UserError(f"the pattern failed on this text ({error}); use one of the built-in patterns")


def find_merges(counter: _core.WordCounter, wanted: int, options: Options) -> Merges:
    """Up to `wanted` merges. Says in one warning each what was replaced, dropped or not found."""
    try:
        merges = counter.train(wanted, options.progress, options.ties == "huggingface")
    except ValueError as error:
        raise UserError(f"{error}: train on less text, or prune") from error
    _, _, replaced, dropped = counter.totals()
    level = 4  # the caller of Tokenizer.train
    if replaced:
        warnings.warn(f"{replaced} invalid UTF-8 sequences were read as U+FFFD", stacklevel=level)
    if dropped:
        warnings.warn(f"{dropped} occurrences of rare words were dropped to stay within memory", stacklevel=level)
    if len(merges) < wanted:
        size = 256 + len(options.special_tokens) + len(merges)
        warnings.warn(
            f"the text yields {len(merges)} merges, {wanted - len(merges)} fewer than asked: "
            f"the vocabulary has {size} tokens instead of {size + wanted - len(merges)}",
            stacklevel=level,
        )
    return merges
