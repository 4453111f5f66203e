"""Loss, perplexity and bits per byte on held-out tokens."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from groundup.data import TokenData, validation_windows
from groundup.errors import UserError
from groundup.model import IGNORE, TransformerLM
from groundup.parallel.processes import World
from groundup.train.guards import is_out_of_memory


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found."""

    loss: float
    """Nats a token, mean over `tokens`."""
    perplexity: float
    """exp(loss): as uncertain as among this many equally likely tokens. Depends on the tokenizer."""
    bits_per_byte: float | None
    """Bits the model needs for a byte of the text. Comparable between tokenizers. None where there is no text."""
    tokens: int
    """Predicted tokens."""
    bytes: int
    """UTF-8 bytes of the text that they stand for; special tokens are none of it."""


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Nats a token → bits a byte: loss / ln 2 / (bytes / tokens)."""
    return loss / math.log(2) / bytes_per_token


@torch.no_grad()
def evaluate(
    model: TransformerLM,
    data: TokenData,
    *,
    batch_size: int = 32,
    batches: int = 0,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_batch: Callable[[], None] = lambda: None,
    world: World | None = None,
    sharded: bool = False,
) -> Evaluation:
    """Evaluate on the validation tokens, in windows of the model's context_length that do not overlap.

    Every token but the first is predicted once, from at most context_length tokens before it. `batches` > 0 reads that
    many batches of `batch_size` windows, spread evenly over the file, the same ones each time. The mean is over tokens,
    whatever batch they were in. Bits per byte is total nats / ln 2 / bytes of the predicted tokens' text, special
    tokens not counted. `before_batch` may raise to stop. The model is in eval mode meanwhile.
    `world`: its ranks take turns at the batches; the result is the same on all of them. Where one runs out of memory,
    all raise OutOfMemoryError at the end; with a `sharded` model, which they run together, that one does at once.
    Raises UserError for fewer than two validation tokens, an id that the model has no row for, or `batches` < 0.
    """
    if batches < 0:
        raise UserError(f"{batches} batches cannot be evaluated; give a number ≥ 1, or 0 for all")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    tokens = size = failed = 0
    ranks = 1 if world is None else world.size
    lengths = data.token_bytes
    try:
        for inputs, targets in _own(_batches(data.valid, model, batch_size, batches), world):
            before_batch()
            try:
                with forward_context():
                    # n_valid 1: the sum over the batch. It stays on the device until the end.
                    nats += model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), n_valid=1)
            except (RuntimeError, MemoryError) as error:
                if sharded or ranks == 1 or not is_out_of_memory(error):
                    raise
                failed += 1
            predicted = targets[targets != IGNORE]
            tokens += len(predicted)
            size += int(lengths[np.minimum(predicted, len(lengths) - 1)].sum())
    finally:
        model.train(was_training)
    if world is not None and ranks > 1:
        sums = world.sum(torch.stack([nats, *map(nats.new_tensor, (tokens, size, failed))]))
        nats, tokens, size = sums[0], int(sums[1]), int(sums[2])
        if int(sums[3]):
            raise torch.OutOfMemoryError("a rank ran out of memory")
    loss = nats.item() / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits = bits_per_byte(loss, size / tokens) if size else None
    return Evaluation(loss, perplexity, bits, tokens, size)


def _own(
    batches: Iterator[tuple[np.ndarray, np.ndarray]], world: World | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every W-th batch, from this rank's on. Where they do not come out even, one that counts nothing: a sharded model
    computes only if all ranks do.
    """
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        held.append(batch)
        if len(held) == size:
            yield held[rank]
            held.clear()
    if held:
        inputs, targets = held[min(rank, len(held) - 1)]
        yield inputs, targets if rank < len(held) else np.full_like(targets, IGNORE)


def check_validation(data: TokenData) -> None:
    """Raise UserError when there is nothing to evaluate on."""
    if len(data.valid) < 2:
        raise UserError(
            "there are no validation tokens to evaluate on; tokenize with a validation file or --valid-fraction, "
            "or set train.eval_every to 0"
        )


def _batches(
    tokens: np.ndarray, model: TransformerLM, batch_size: int, batches: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All batches of the file, or `batches` of them at equal distances."""
    context_length, vocab_size = model.config.context_length, model.config.vocab_size
    tokens_per_batch = batch_size * context_length
    total = math.ceil((len(tokens) - 1) / tokens_per_batch)
    if not 0 < batches < total:
        yield from validation_windows(tokens, context_length, batch_size, vocab_size)
        return
    for i in range(batches):
        first = i * total // batches * tokens_per_batch
        part = tokens[first : first + tokens_per_batch + 1]
        yield from validation_windows(part, context_length, batch_size, vocab_size)
