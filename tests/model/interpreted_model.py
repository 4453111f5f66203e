"""The model through its Triton kernels against the plain model; test_model_kernels.py runs it, interpreted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from groundup.config import ModelConfig
from groundup.generate import generate
from groundup.model import TransformerLM

VARIANTS: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 2, "qk_norm": True, "tie_embeddings": True, "attention_softcap": 3.0, "logit_softcap": 4.0},
    {"position": "nope", "norm": "post", "ffn": "relu2", "checkpoint_activations": 1},
]
SHAPE = ModelConfig(vocab_size=61, context_length=16, d_model=64, n_layers=2, n_heads=4, d_ff=96)


@pytest.mark.parametrize("changes", VARIANTS)
def test_kernels_in_the_model(changes: dict[str, Any]):
    torch._dynamo.reset()  # a soft cap that changes from one model to the next would be traced as a variable
    plain = TransformerLM(replace(SHAPE, attention="reference", kernels="reference", **changes))
    fused = TransformerLM(replace(SHAPE, attention="flash-triton", kernels="triton", **changes))
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    torch.testing.assert_close(fused(ids), plain(ids), rtol=1e-4, atol=1e-5)
    expected = plain(ids, targets, 30.0)
    gradients = torch.autograd.grad(expected, list(plain.parameters()))
    for model in (fused, torch.compile(fused, backend="aot_eager", fullgraph=True)):
        loss = model(ids, targets, 30.0)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, list(fused.parameters())), gradients)
    # One query over many keys, and a window that slides.
    assert list(generate(fused, range(14), 4, 0)) == list(generate(plain, range(14), 4, 0))
