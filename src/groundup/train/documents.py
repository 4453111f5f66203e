"""Loss by document: which texts a model knows least.

Each document stands for itself: it is read after `<|endoftext|>`, as in training, and nothing of the document before it
is seen. So a document's numbers do not depend on its neighbours, and differ a little from those of `evaluate`, whose
windows run on across documents. A document longer than the context is cut into windows that do not overlap. The token
that ends the document is predicted too: without it the model would not have told where the text stops.

Windows of similar length share a batch, padded on the right, where a causal model sees nothing of the padding.
Cost: one pass over the tokens, and the padding (few percent).
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from groundup.data import TokenData
from groundup.data.sampler import gather
from groundup.model import IGNORE, TransformerLM, cross_entropy
from groundup.train.evaluate import bits_per_byte

BEGINNING = 12
"""Tokens of a document that a report shows."""


@dataclass(frozen=True)
class Document:
    """One validation document."""

    index: int
    """Its place in the file, from 0."""
    tokens: int
    """Predicted tokens, `<|endoftext|>` included."""
    bytes: int
    """UTF-8 bytes of the text; special tokens are none of it."""
    loss: float
    """Nats a token."""
    bits_per_byte: float | None
    """Bits for a byte of the text, its end included; None for a document without text."""
    beginning: str
    """The text's first characters, up to `BEGINNING` tokens."""


@dataclass(frozen=True)
class DocumentEvaluation:
    """What `evaluate_documents` found."""

    documents: list[Document]
    """In the file's order."""

    @property
    def mean_loss(self) -> float:
        """Mean over documents, a short one weighing as much as a long one."""
        return statistics.fmean(document.loss for document in self.documents)

    @property
    def median_loss(self) -> float:
        return statistics.median(document.loss for document in self.documents)

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)

    @property
    def bytes(self) -> int:
        return sum(document.bytes for document in self.documents)

    @property
    def loss(self) -> float:
        """Nats a token, mean over tokens."""
        return sum(document.loss * document.tokens for document in self.documents) / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Of all documents together; None where there is no text at all."""
        return bits_per_byte(self.loss, self.bytes / self.tokens) if self.bytes else None

    def worst(self, count: int) -> list[Document]:
        """The `count` documents of highest loss, the highest first."""
        return sorted(self.documents, key=lambda d: (-d.loss, d.index))[:count]


@torch.no_grad()
def evaluate_documents(
    model: TransformerLM,
    data: TokenData,
    *,
    batch_size: int = 32,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DocumentEvaluation:
    """Evaluate every validation document. The model is in eval mode meanwhile.

    Raises UserError for an id that the model has no row for.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    tokenizer = data.tokenizer()
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    edges = np.append(data.valid_docs, len(data.valid)).astype(np.int64)
    nats = np.zeros(len(data.valid_docs))
    try:
        for owners, inputs, targets in _batches(data, edges, model.config.context_length, batch_size, vocab_size):
            with forward_context():
                logits = model(torch.from_numpy(inputs).to(device))
            wanted = torch.from_numpy(targets).to(device)
            rows = torch.stack([cross_entropy(*row, n_valid=1) for row in zip(logits, wanted, strict=True)])
            np.add.at(nats, owners, rows.double().cpu().numpy())
    finally:
        model.train(was_training)
    lengths = data.token_bytes
    sizes = [int(lengths[data.valid[start:end]].sum()) for start, end in pairwise(edges.tolist())]
    # The last token is <|endoftext|>, which is no part of the text.
    beginnings = [
        tokenizer.decode(data.valid[start : min(start + BEGINNING, end - 1)]) for start, end in pairwise(edges.tolist())
    ]
    columns = zip(nats.tolist(), np.diff(edges).tolist(), sizes, beginnings, strict=True)
    return DocumentEvaluation(
        [
            Document(index, n, size, total / n, bits_per_byte(total / n, size / n) if size else None, beginning)
            for index, (total, n, size, beginning) in enumerate(columns)
        ]
    )


def _batches(
    data: TokenData, edges: np.ndarray, context_length: int, batch_size: int, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(documents, inputs, targets) of windows of similar length; a document's first input is `<|endoftext|>`."""
    eot = data.meta["eot_id"]
    windows = [
        (document, start, min(start + context_length, int(edges[document + 1])))
        for document in range(len(edges) - 1)
        for start in range(int(edges[document]), int(edges[document + 1]), context_length)
    ]
    windows.sort(key=lambda window: window[2] - window[1])
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        longest = batch[-1][2] - batch[-1][1]
        inputs = np.full((len(batch), longest), eot, dtype=np.int64)
        targets = np.full((len(batch), longest), IGNORE, dtype=np.int64)
        for row, (document, start, end) in enumerate(batch):
            ids = gather(data.valid, np.array([start]), end - start, vocab_size)[0]
            targets[row, : len(ids)] = ids
            inputs[row, 1 : len(ids)] = ids[:-1]
            if start > edges[document]:
                inputs[row, 0] = data.valid[start - 1]
        yield np.array([window[0] for window in batch]), inputs, targets
