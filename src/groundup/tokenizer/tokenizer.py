"""The tokenizer: byte-level BPE over pre-tokens (Sennrich et al. 2016; Radford et al. 2019).

Ids of a trained tokenizer: 0–255 are the bytes, 256 + i is merge i, special tokens come last. A loaded vocabulary
keeps the ids it has. Every text has ids and every list of valid ids has bytes: there is no unknown token.
"""

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from groundup import _core
from groundup.errors import UserError, optional_package
from groundup.files import directory_written_aside, write_atomic
from groundup.tokenizer import formats
from groundup.tokenizer.allowed import Names, allowed_names, split_at
from groundup.tokenizer.decoding import decode_offsets, decode_stream, readable
from groundup.tokenizer.normal import nfc, nfc_chunks
from groundup.tokenizer.ranks import mergeable_ranks, parts_of_ranks, rank_lines, read_ranks
from groundup.tokenizer.training import (
    Options,
    Progress,
    available_threads,
    check_special_tokens,
    count_files,
    count_texts,
    count_words,
    find_merges,
    merges_wanted,
)

if TYPE_CHECKING:
    import numpy as np
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """A vocabulary with its merges. Immutable; may be used from any thread and in forked children."""

    CACHE_BYTES = _core.CACHE_BYTES
    """No thread's word cache takes more memory than this, and all together take twice as much (see `cache_bytes`)."""

    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: list[tuple[bytes, bytes]],
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
    ):
        """`vocab`: id → bytes, with all 256 single bytes. `merges`: by rank. Special tokens that the vocabulary lacks
        are appended to it, in the order given."""
        check_special_tokens(special_tokens)
        tokens = dict(vocab)
        made = {left + right for left, right in merges}
        specials: dict[str, int] = {}
        for name in special_tokens:
            token = name.encode()
            numbers = [number for number, other in tokens.items() if other == token]
            if not numbers or (len(numbers) == 1 and (len(token) == 1 or token in made)):
                numbers = [max(tokens, default=-1) + 1]  # not there, or an ordinary token that is spelled alike
                tokens[numbers[0]] = token
            specials[name] = max(numbers)
        self._setup(formats.Parts(tokens, list(merges), specials, formats.pattern_name(pattern)))

    @classmethod
    def _from_parts(cls, parts: formats.Parts) -> "Tokenizer":
        tokenizer = cls.__new__(cls)
        tokenizer._setup(parts)
        return tokenizer

    def _setup(self, parts: formats.Parts) -> None:
        if parts.vocab and min(parts.vocab) < 0:
            raise UserError(f"the vocabulary holds the negative id {min(parts.vocab)}")
        self._parts = parts
        size = self._size = max(parts.vocab, default=-1) + 1
        if size > 2 * len(parts.vocab) + 65_536:
            raise UserError(f"the vocabulary has {len(parts.vocab)} tokens but ids up to {size - 1}: ids must be dense")
        tokens: list[bytes | None] = [parts.vocab.get(number) for number in range(size)]
        ranked, merged = formats.ranked_merges(parts)
        specials = [(name.encode(), number) for name, number in parts.special_tokens.items()]
        try:
            self._core = _core.Encoder(tokens, ranked, merged, specials, parts.pattern, parts.whole_pieces)
        except ValueError as error:
            raise UserError(str(error)) from error

    # Training and files

    @classmethod
    def train(
        cls,
        inputs: Iterable[str | os.PathLike],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        threads: int = 0,
        pattern: str = "gpt2",
        errors: str = "strict",
        ties: str = "greatest",
        memory: int = 0,
        prune: bool = False,
        progress: Progress | None = None,
        text_field: str = "text",
    ) -> "Tokenizer":
        """Train on text files and folders (also .jsonl, and .gz, .xz, .zst of either).

        The result does not depend on `threads` (0: all cores) or the order of the files, but for the words that `prune`
        drops. Text that yields fewer merges than asked gives a smaller vocabulary and a warning.

        pattern: "gpt2", "cl100k", "llama3" or a regular expression. errors: "replace" replaces invalid UTF-8 by U+FFFD
        and warns. ties: which of equally frequent pairs goes first; "greatest" is the lexicographically greater pair
        of byte strings, "huggingface" reproduces the merges of tokenizers' trainer. memory: bound in bytes on what
        training allocates (0: none); when the distinct words do not fit, it is an error, or with `prune` the rarest
        are dropped. progress: see `training.Progress`. text_field: the field of a JSON line that holds its text.
        """
        name = formats.pattern_name(pattern)
        options = Options(special_tokens, name, threads, errors, ties, memory, prune, progress, text_field)
        return cls._train(count_files, inputs, vocab_size, options)

    @classmethod
    def train_from_texts(
        cls,
        texts: Iterable[str | bytes],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        **options,
    ) -> "Tokenizer":
        """Train on an iterator of texts, each a document. `options` as in `train`."""
        name = formats.pattern_name(pattern)
        return cls._train(count_texts, texts, vocab_size, Options(special_tokens, name, **options))

    @classmethod
    def train_from_counts(
        cls,
        words: Mapping[str | bytes, int],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        **options,
    ) -> "Tokenizer":
        """Train on pre-tokens that were counted elsewhere. `options` as in `train`."""
        name = formats.pattern_name(pattern)
        return cls._train(count_words, words, vocab_size, Options(special_tokens, name, **options))

    @classmethod
    def _train(cls, count: Callable, source: Iterable, vocab_size: int, options: Options) -> "Tokenizer":
        wanted = merges_wanted(vocab_size, options.special_tokens)
        merges = find_merges(count(source, options), wanted, options)
        vocab = {byte: bytes([byte]) for byte in range(256)}
        vocab.update({256 + rank: left + right for rank, (left, right) in enumerate(merges)})
        first = len(vocab)
        specials = {name: first + place for place, name in enumerate(options.special_tokens)}
        vocab.update({number: name.encode() for name, number in specials.items()})
        return cls._from_parts(formats.Parts(vocab, merges, specials, options.pattern))

    @classmethod
    def from_ranks(
        cls,
        ranks: dict[bytes, int] | str | os.PathLike,
        special_tokens: dict[str, int] | None = None,
        pattern: str = "cl100k",
    ) -> "Tokenizer":
        """A tiktoken vocabulary: tokens and their ranks, as a dictionary or a `.tiktoken` file."""
        table = ranks if isinstance(ranks, dict) else read_ranks(Path(ranks))
        check_special_tokens(list(special_tokens or {}))
        return cls._from_parts(parts_of_ranks(table, special_tokens or {}, formats.pattern_name(pattern)))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Load a folder or file that `save`, Hugging Face's tokenizers or GPT-2's release wrote."""
        return cls._from_parts(formats.read(Path(path)))

    def save(self, directory: str | os.PathLike) -> None:
        """Write `tokenizer.json`, `vocab.json` and `merges.txt`; an existing directory is replaced at the end."""
        formats.warn_of_alike(self._parts)
        with directory_written_aside(Path(directory)) as aside:
            formats.write_files(self._parts, aside)

    def save_json(self, path: str | os.PathLike) -> None:
        """Write `tokenizer.json` alone."""
        formats.warn_of_alike(self._parts)
        write_atomic(Path(path), formats.json_text(self._parts))

    def save_ranks(self, path: str | os.PathLike) -> None:
        """Write a tiktoken rank file (special tokens and pattern are not part of that format)."""
        write_atomic(Path(path), rank_lines(self._parts))

    def to_tiktoken(self, name: str = "groundup") -> "tiktoken.Encoding":
        """The same vocabulary as an object of tiktoken."""
        if self._parts.normalizer:
            raise UserError(f"to_tiktoken: tiktoken cannot express the normalizer {self._parts.normalizer}")
        tiktoken = optional_package("tiktoken", "to_tiktoken")
        return tiktoken.Encoding(
            name,
            pat_str=formats.expression_of(self.pattern),
            mergeable_ranks=mergeable_ranks(self._parts),
            special_tokens=self.special_tokens,
        )

    def to_hf(self) -> "tokenizers.Tokenizer":
        """The same vocabulary as an object of Hugging Face's tokenizers."""
        if alike := formats.spelled_alike(self._parts):
            raise UserError(f"to_hf: the special token {alike[0]!r} is spelled like an ordinary one: rename it")
        tokenizers = optional_package("tokenizers", "to_hf")
        return tokenizers.Tokenizer.from_str(formats.json_text(self._parts))

    # What it is

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._size

    @property
    def vocab(self) -> dict[int, bytes]:
        return dict(self._parts.vocab)

    @property
    def merges(self) -> list[tuple[bytes, bytes]]:
        return list(self._parts.merges)

    @property
    def special_tokens(self) -> dict[str, int]:
        return dict(self._parts.special_tokens)

    @property
    def pattern(self) -> str:
        return self._parts.pattern

    @property
    def eot_id(self) -> int | None:
        """Id of `<|endoftext|>`, None without one."""
        return self._parts.special_tokens.get(END_OF_TEXT)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of vocabulary, merges, special tokens and pattern: the same for every file format."""
        vocab = self._parts.vocab
        parts = [b"%d %d:%b\n" % (number, len(vocab[number]), vocab[number]) for number in sorted(vocab)]
        parts += [b"%d:%b %d:%b\n" % (len(left), left, len(right), right) for left, right in self._parts.merges]
        parts += [b"%d %b\n" % (number, name.encode()) for name, number in sorted(self._parts.special_tokens.items())]
        parts.append(self._parts.pattern.encode() + b" whole" * self._parts.whole_pieces)
        parts.append(b" " * bool(self._parts.normalizer) + self._parts.normalizer.encode())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return self._parts.vocab[index(token_id)]
        except (KeyError, TypeError):
            raise self._unknown(token_id) from None

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special_tokens={list(self._parts.special_tokens)})"

    def __reduce__(self):
        return Tokenizer._from_parts, (self._parts,)

    # Encoding

    def encode(self, text: str | bytes, allowed_special: Names = "all", disallowed_special: Names = ()) -> list[int]:
        """Ids of a text. `bytes` need not be UTF-8: ill-formed bytes count as punctuation and come back unchanged.

        Special tokens in the text become their ids. `allowed_special` names those that do ("all", or a set of
        names); one of `disallowed_special` ("all": all that are not allowed) in the text raises UserError; one that is
        in neither is ordinary text.
        """
        with _clear_errors():
            if _everything(allowed_special, disallowed_special):
                return self._core.encode(self._normal(text), True)
            names = allowed_names(self._parts.special_tokens, allowed_special, disallowed_special, text)
            ids: list[int] = []
            for part, special in split_at(text, names):
                if special is None:
                    ids += self._core.encode(nfc(part, ()) if self._parts.normalizer else part, False)
                else:
                    ids.append(self._parts.special_tokens[special])
            return ids

    def encode_ordinary(self, text: str | bytes) -> list[int]:
        """Ids of a text in which special tokens are ordinary text."""
        return self.encode(text, allowed_special=())

    def encode_numpy(
        self, text: str | bytes, allowed_special: Names = "all", disallowed_special: Names = ()
    ) -> "np.ndarray":
        """Ids of a text as uint16 (vocabularies up to 65,536 tokens) or uint32, without a list in between.

        Special tokens as in `encode`; a list is made after all where not all of them are allowed.
        """
        import numpy as np

        dtype = np.uint32 if self.vocab_size > 65_536 else np.uint16
        if not _everything(allowed_special, disallowed_special):
            return np.array(self.encode(text, allowed_special, disallowed_special), dtype)
        with _clear_errors():
            return np.frombuffer(memoryview(self._core.encode_buffer(self._normal(text), True)), dtype)

    def encode_batch(
        self,
        texts: Sequence[str | bytes],
        threads: int = 0,
        allowed_special: Names = "all",
        disallowed_special: Names = (),
    ) -> list[list[int]]:
        """Ids of many texts, on `threads` threads (0: all cores); special tokens as in `encode`."""
        threads = available_threads(threads)
        if not _everything(allowed_special, disallowed_special):
            return [self.encode(text, allowed_special, disallowed_special) for text in texts]
        normal = [self._normal(text) for text in texts]
        with _clear_errors():
            return self._core.encode_batch(normal, True, threads)

    @property
    def cache_bytes(self) -> int:
        """Memory of the word caches in which encoding remembers the ids of pieces, those at work excepted.

        There is one for each thread that has encoded at the same time as others, of at most `CACHE_BYTES` bytes; more
        than two share twice that.
        """
        return self._core.cache_bytes()

    def encode_iterable(self, chunks: Iterable[str | bytes]) -> Iterator[int]:
        """Ids of a text that arrives in chunks, lazily: the same ids wherever it is cut.

        Holds back the end of the text as long as a continuation could change its ids, so memory is bounded by the
        largest chunk and the longest pre-token, of a long run of one white-space character by its edges alone (with
        a pattern of one's own: by the longest text without a special token).
        """
        stream = self._core.stream()
        if self._parts.normalizer:
            chunks = nfc_chunks(map(_utf8, chunks), self._parts.special_tokens)
        for chunk in chunks:
            with _clear_errors():  # those of the core alone: what `chunks` raises is not about the text
                ids = stream.feed(chunk)
            yield from ids
        with _clear_errors():
            ids = stream.finish()
        yield from ids

    def _normal(self, text: str | bytes) -> str | bytes:
        """The text as the normalizer of a loaded tokenizer wants it."""
        if not self._parts.normalizer or not isinstance(text, (str, bytes)):
            return text
        return nfc(text, self._parts.special_tokens)

    # Decoding

    def decode_bytes(self, ids: "Iterable[int] | np.ndarray") -> bytes:
        """The bytes of ids; from a NumPy array, without a Python number an id. Tensors will do."""
        ids = readable(ids)
        with self._known(ids):
            return self._core.decode(ids)

    def decode(self, ids: "Iterable[int] | np.ndarray", errors: str = "replace") -> str:
        """The text of ids. They may end inside a character, or hold any bytes: `errors` as in `bytes.decode`."""
        ids = readable(ids)
        with self._known(ids):
            return self._core.decode_text(ids, errors)

    @contextmanager
    def _known(self, ids: "Iterable[int] | np.ndarray") -> Generator[None]:
        """Names the id at fault when the core refuses one of `ids`."""
        try:
            yield
        except UnicodeError:
            raise
        except (ValueError, OverflowError) as error:
            raise self._unknown(next(i for i in ids if i not in self._parts.vocab)) from error

    def decode_batch(self, batch: Iterable[Iterable[int]], errors: str = "replace") -> list[str]:
        """The text of each list of ids."""
        return [self.decode(ids, errors) for ids in batch]

    def decode_iterable(self, ids: Iterable[int], errors: str = "replace") -> Iterator[str]:
        """The text of ids that arrive one by one, in pieces that never end inside a character.

        Joined, the pieces equal `decode` of all the ids. Memory: one unfinished character.
        """
        return decode_stream(map(self.token_bytes, ids), errors)

    def decode_with_offsets(self, ids: Iterable[int], errors: str = "replace") -> tuple[str, list[int]]:
        """The text, and for each id the index of the character that the token's first byte belongs to."""
        return decode_offsets(map(self.token_bytes, ids), errors)

    def _unknown(self, token_id: object) -> UserError:
        return UserError(f"id {token_id} is not in the vocabulary: legal ids are 0 to {self.vocab_size - 1}")


def _everything(allowed: Names, disallowed: Names) -> bool:
    """Whether every special token becomes its id, which the core does by itself."""
    return allowed == "all" and (disallowed == "all" or not disallowed)


def _utf8(text: str | bytes) -> bytes:
    with _clear_errors():
        return text.encode() if isinstance(text, str) else text


@contextmanager
def _clear_errors() -> Generator[None]:
    """Turns what the core says about a text into a line for the user."""
    try:
        yield
    except UnicodeEncodeError as error:
        # UTF-8 has no surrogates, so such a str is no text (Python makes them with errors="surrogateescape").
        raise UserError(
            f"the text holds the lone surrogate U+{ord(error.object[error.start]):04X} at character {error.start}: "
            'repair it, for example with text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
        ) from error
    except ValueError as error:
        raise UserError(f"the pattern failed on this text ({error}); shorter texts may do") from error
