"""Which tokens a training step sees: a pure function of (seed, step).

The token file is cut into windows of context_length + 1 tokens at a stride of context_length: the first
context_length tokens are the inputs, the last context_length the targets, so that each target is the next token of
the file and none lies past its end. Window number g = step × global_batch_size + row of the whole run belongs to
epoch g // windows_per_epoch, and that epoch's own permutation says which window it is. Nothing is carried from one
step to the next: a resumed run, or one on another number of ranks, computes the same numbers. Batches run on across
the end of an epoch, so each window comes exactly once an epoch whatever the batch size.

`order="random"` draws starts uniformly from every legal one, 0 … n_tokens - context_length - 1, each (step, row)
hashed by itself.

Cost: O(global_batch_size) a step, no table (permutation.py). The (n_tokens - 1) mod context_length targets after the
last whole window are not trained on in shuffled order; evaluation (`validation_windows`) reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from groundup.data.npy import release_pages
from groundup.data.permutation import make_key, permute
from groundup.errors import UserError

IGNORED = -100
"""Target of a padded position; the loss leaves it out."""


@dataclass(frozen=True)
class WindowSampler:
    """Batches of a token file of `n_tokens` tokens. Raises UserError when it does not hold one window.

    The rest comes from a resolved configuration: order is legal, the batch is positive and divides over the ranks.
    """

    n_tokens: int
    context_length: int
    global_batch_size: int
    """Windows a step, over all ranks."""
    seed: int = 0
    order: Literal["shuffled", "random"] = "shuffled"
    vocab_size: int = 0
    """Where given, `batch` refuses ids that the model has no row for."""

    def __post_init__(self) -> None:
        check_window(self.n_tokens, self.context_length)

    @property
    def windows_per_epoch(self) -> int:
        return (self.n_tokens - 1) // self.context_length

    def starts(self, step: int) -> np.ndarray:
        """The first token of each window of the step's global batch: int64 (global_batch_size,)."""
        return self._starts(step, 0, self.global_batch_size)

    def _starts(self, step: int, first: int, last: int) -> np.ndarray:
        """Rows first … last - 1 of the step's global batch."""
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        rows = step * self.global_batch_size + np.arange(first, last, dtype=np.int64)
        if self.order == "random":
            legal = self.n_tokens - self.context_length
            # mod: a start is favoured by at most legal / 2^64
            return (make_key(self.seed, rows) % np.uint64(legal)).astype(np.int64)
        epochs, positions = np.divmod(rows, self.windows_per_epoch)
        keys = make_key(self.seed, epochs[:1] if epochs[0] == epochs[-1] else epochs)
        return permute(positions, self.windows_per_epoch, keys).astype(np.int64) * self.context_length

    def batch(self, tokens: np.ndarray, step: int, rank: int = 0, world_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The rank's inputs and targets, both int64 (global_batch_size / world_size, context_length).

        tokens: the 1-D array of all n_tokens ids (in memory or mapped). Ranks hold consecutive slices: stacked in
        rank order they are the batch of a single process.
        """
        if len(tokens) != self.n_tokens:
            raise ValueError(f"the sampler is for {self.n_tokens} tokens, the array holds {len(tokens)}")
        rows = self.global_batch_size // world_size
        starts = self._starts(step, rank * rows, (rank + 1) * rows)
        windows = gather(tokens, starts, self.context_length + 1, self.vocab_size)
        return windows[:, :-1].copy(), windows[:, 1:].copy()


def check_window(n_tokens: int, context_length: int) -> None:
    """Raise UserError when `n_tokens` tokens do not fill one window of context_length + 1."""
    if context_length < 1:
        raise UserError(f"context_length is {context_length}; it must be at least 1")
    if n_tokens < context_length + 1:
        shorter = f", or set model.context_length to at most {n_tokens - 1}" if n_tokens > 1 else ""
        raise UserError(
            f"{n_tokens} tokens are fewer than one window of {context_length + 1} "
            f"(context_length {context_length} + 1); tokenize more text{shorter}"
        )


def gather(tokens: np.ndarray, starts: np.ndarray, length: int, vocab_size: int = 0) -> np.ndarray:
    """tokens[start : start + length] for each start: int64 (len(starts), length).

    A slice a window, not one fancy index: the same speed from about 100 tokens on, and no (rows, length) index
    array. Raises UserError for an id ≥ vocab_size (0: not checked).
    """
    windows = np.empty((len(starts), length), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        windows[row] = tokens[start : start + length]
    release_pages(tokens, starts, length)
    if vocab_size and windows.size and windows.max() >= vocab_size:
        row, column = np.unravel_index(windows.argmax(), windows.shape)
        raise UserError(
            f"token {starts[row] + column} has id {windows.max()}, but vocab_size is {vocab_size}; the tokens "
            "belong to another tokenizer or are corrupt: tokenize the text again, or set model.vocab_size"
        )
    return windows


def validation_windows(
    tokens: np.ndarray, context_length: int, batch_size: int, vocab_size: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The whole file in order for evaluation: every token but the first is a target exactly once.

    Yields (inputs, targets), both int64 (≤ batch_size, context_length); only the last batch may have fewer rows.
    The last window, where the file does not fill it, is padded with id 0 and target -100. Batches are the same on
    every call. Raises UserError for fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise UserError(f"{len(tokens)} validation tokens leave nothing to predict; tokenize more validation text")
    whole, left = divmod(len(tokens) - 1, context_length)
    count = whole + (left > 0)
    for first in range(0, count, batch_size):
        rows = np.arange(first, min(first + batch_size, count), dtype=np.int64) * context_length
        padded = left > 0 and first + len(rows) == count
        full = rows[:-1] if padded else rows
        inputs = np.zeros((len(rows), context_length), dtype=np.int64)
        targets = np.full((len(rows), context_length), IGNORED, dtype=np.int64)
        windows = gather(tokens, full, context_length + 1, vocab_size)
        inputs[: len(full)], targets[: len(full)] = windows[:, :-1], windows[:, 1:]
        if padded:
            last = gather(tokens, rows[-1:], left + 1, vocab_size)[0]
            inputs[-1, :left], targets[-1, :left] = last[:-1], last[1:]
        yield inputs, targets
