"""The compiled step against the plain one, and how often it is compiled."""

import pytest
import torch
from test_batch import prompts
from test_engine import make
from torch._dynamo.utils import counters

from groundup.generate import KVCache, decode, generate, generate_batch
from groundup.generate.decode import CompiledDecode
from groundup.generate.engine import inference, prefill, step

VARIANTS = [
    {},
    {"n_kv_heads": 2, "tie_embeddings": True, "qk_norm": True, "logit_softcap": 4.0, "attention_softcap": 3.0},
    {"norm": "post", "position": "nope", "ffn": "relu2"},
]


@pytest.fixture(autouse=True)
def afresh(request, monkeypatch):
    """Graphs are traced and counted as ever, and then run as they are: C++ of them takes a minute to make.

    On a GPU they are compiled, but no kernel is tuned: that tries dozens of tiles of each, most of a minute a shape.
    """
    torch._dynamo.reset()
    counters.clear()
    precision = torch.get_float32_matmul_precision()  # a run before this may have left TF32 on
    torch.set_float32_matmul_precision("highest")
    marks = {mark.name for mark in request.node.iter_markers()}
    if "slow" not in marks:
        backend = "inductor" if "gpu" in marks else "eager"
        traced = torch.compile(decode.decode, backend=backend, dynamic=False, fullgraph=True)
        monkeypatch.setattr(decode, "compiled_decode", lambda on_gpu: traced)
    yield
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()


@pytest.mark.parametrize("changes", VARIANTS)
def test_compiled_logits_are_the_plain_ones_at_every_place(changes):
    model, batch = make(**changes), prompts([3, 9, 1])
    cache, twin = (KVCache(model.config, 3, torch.float64, "cpu") for _ in range(2))
    compiled = CompiledDecode(model, twin.keys, twin.values)
    with inference(model.modules()):
        prefill(model, cache, range(3), batch)
        prefill(model, twin, range(3), batch)
        for token in (4, 80, 0):
            plain = step(model, cache, [token, token + 1, token + 2])
            torch.testing.assert_close(step(model, twin, [token, token + 1, token + 2], compiled), plain)
        torch.testing.assert_close(twin.keys, cache.keys)
    assert counters["stats"]["unique_graphs"] == 1


def test_fifty_prompt_lengths_compile_once():
    model = make(context_length=64)
    for length in range(1, 51):
        (prompt,) = prompts([length])
        expected = list(generate(model, prompt, 6, seed=length))
        assert list(generate(model, prompt, 6, seed=length, compiled=True)) == expected
    assert counters["stats"]["unique_graphs"] == 1


def test_the_ninth_batch_size_is_compiled_as_the_first():
    """Dynamo allows eight of a function, unless told otherwise."""
    model = make()
    for size in range(1, 10):
        found = generate_batch(model, [[1, 2]] * size, 3, 0, compiled=True)
        assert found == generate_batch(model, [[1, 2]] * size, 3, 0)
    assert counters["stats"]["unique_graphs"] == 9


def test_a_batch_slides_and_stops_as_the_plain_one():
    model, batch = make(context_length=16, n_kv_heads=2), prompts([3, 16, 1, 30])
    settings = {"temperature": 0.8, "top_k": 40, "seed": 3, "stop_ids": range(0, 97, 9)}
    assert generate_batch(model, batch, 40, compiled=True, **settings) == generate_batch(model, batch, 40, **settings)
    assert counters["stats"]["unique_graphs"] == 1


def test_padded_ids_are_never_drawn():
    model = make(context_length=16, vocab_size=128)
    with torch.no_grad():
        model.lm_head.weight[100:] = model.lm_head.weight[:28] * 50
    assert max(generate(model, [5, 6], 60, seed=1, vocab_limit=100, compiled=True)) < 100


def test_a_step_joins_no_weights(monkeypatch):
    """Copying q, k and v's weights together would cost as much as reading them, for every token."""
    model, sizes, cat = make(), [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *rest: sizes.append(cat(tensors, *rest)) or sizes[-1])
    list(generate(model, [1, 2, 3], 4))
    assert all(made.numel() < 100 for made in sizes)
    model(torch.tensor([[1, 2]]))
    assert sizes[-1].shape == (3 * 32, 32)


@pytest.mark.slow
def test_as_compiled_code():
    model, (prompt,) = make(context_length=24, n_kv_heads=2), prompts([5])
    assert list(generate(model, prompt, 40, 0, compiled=True)) == list(generate(model, prompt, 40, 0))


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "batched"), [(VARIANTS[1], True), (VARIANTS[2], False)])
def test_on_the_gpu_by_cuda_graph(changes, batched):
    model = make(context_length=64, dtype=torch.float32, **changes).cuda()
    for length in (1, 5, 30):
        (prompt,) = prompts([length])
        assert list(generate(model, prompt, 80, 0, compiled=True)) == list(generate(model, prompt, 80, 0))
    if batched:
        batch = prompts([3, 40, 1, 30])
        assert generate_batch(model, batch, 80, 0, compiled=True) == generate_batch(model, batch, 80, 0)
    assert counters["stats"]["unique_graphs"] == 1 + batched
