"""Loss by document against one document at a time, in float64, window by window."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import EOT, tiny_config, write_tokens

from groundup.config import ModelConfig
from groundup.data import TokenData
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.train import evaluate, evaluate_documents

torch.set_num_threads(1)

TEXTS = ["a", "", "the second text, of more than one window of thirty-two tokens", "x" * 31, "y" * 32, "é🙂"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token directory whose validation tokens are TEXTS, bytes as ids."""
    directory = write_tokens(tmp_path_factory.mktemp("tokens"))
    ids = [[*text.encode(), EOT] for text in TEXTS]
    starts = np.cumsum([0, *map(len, ids)])[:-1].astype(np.uint64)
    np.save(directory / "valid.npy", np.array([i for text in ids for i in text], dtype=np.uint16))
    np.save(directory / "valid.docs.npy", starts)
    meta = json.loads((directory / "meta.json").read_text())
    size = sum(len(text.encode()) for text in TEXTS)
    meta["splits"]["valid"] |= {"tokens": sum(map(len, ids)), "bytes": size, "documents": len(TEXTS)}
    (directory / "meta.json").write_text(json.dumps(meta))
    return directory


@pytest.fixture(scope="module")
def model(tokens: Path) -> TransformerLM:
    model = TransformerLM(tiny_config(tokens).model).double()
    model.init_weights(3)
    return model


@torch.no_grad()
def document_nats(model: TransformerLM, text: str) -> list[float]:
    """Nats of each token of [text, <|endoftext|>] after <|endoftext|>, in windows of 32 targets."""
    stream, nats = [EOT, *text.encode(), EOT], []
    for start in range(0, len(stream) - 1, 32):
        window = torch.tensor(stream[start : start + 33])
        logits = model(window[None, :-1])[0]
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
    return nats


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_each_document_stands_for_itself(batch_size: int, model: TransformerLM, tokens: Path):
    found = evaluate_documents(model, TokenData.open(tokens), batch_size=batch_size)
    truth = [document_nats(model, text) for text in TEXTS]
    flat = [value for nats in truth for value in nats]
    for index, (document, text, nats) in enumerate(zip(found.documents, TEXTS, truth, strict=True)):
        size = len(text.encode())
        assert (document.index, document.tokens, document.bytes) == (index, size + 1, size)
        assert document.loss == pytest.approx(np.mean(nats), rel=1e-9)
        assert document.bits_per_byte == (pytest.approx(sum(nats) / math.log(2) / size, rel=1e-9) if size else None)
        assert document.beginning.rstrip("\ufffd") == text.encode()[:12].decode(errors="ignore")
    means = [float(np.mean(nats)) for nats in truth]
    assert found.mean_loss == pytest.approx(np.mean(means), rel=1e-9)
    assert found.median_loss == pytest.approx(np.median(means), rel=1e-9)
    assert found.loss == pytest.approx(np.mean(flat), rel=1e-9)
    assert found.bits_per_byte == pytest.approx(np.sum(flat) / math.log(2) / found.bytes, rel=1e-9)
    assert (found.tokens, found.bytes) == (sum(map(len, truth)), sum(len(text.encode()) for text in TEXTS))
    assert [d.index for d in found.worst(2)] == sorted(range(6), key=lambda i: -means[i])[:2]


def test_one_document_of_one_window_agrees_with_evaluate(tmp_path: Path):
    """The same targets but one: `evaluate` has nothing before the first token and does not predict it."""
    directory = write_tokens(tmp_path, n_valid=32)
    model = TransformerLM(tiny_config(directory).model)
    data = TokenData.open(directory)
    found = evaluate_documents(model, data)
    assert (found.tokens, len(found.documents)) == (evaluate(model, data).tokens + 1, 1)
    assert found.bytes == 31


def test_an_id_without_a_row_is_named(tokens: Path):
    small = TransformerLM(ModelConfig(vocab_size=100, context_length=32, d_model=16, n_layers=1, n_heads=2))
    with pytest.raises(UserError, match="vocab_size is 100"):
        evaluate_documents(small, TokenData.open(tokens))


def test_the_mode_of_the_model_comes_back(model: TransformerLM, tokens: Path):
    for mode in (True, False):
        model.train(mode)
        evaluate_documents(model, TokenData.open(tokens))
        assert model.training is mode
