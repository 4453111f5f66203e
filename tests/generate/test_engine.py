"""The cached engine against the plain model over the whole window, recomputed for each token."""

import gc
import math

import pytest
import torch

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.generate import KVCache, generate
from groundup.generate.engine import checked_tokens, prefill, step
from groundup.generate.sampling import sample, seeded_generator
from groundup.model import TransformerLM

SHAPES = {
    "mha": {},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "gqa-tied": {"n_kv_heads": 2, "tie_embeddings": True},
}
PROMPT = [5, 17, 3, 88, 3]


def make(context_length=16, dtype=torch.float64, vocab_size=97, **shape) -> TransformerLM:
    config = ModelConfig(
        vocab_size=vocab_size, context_length=context_length, d_model=32, n_layers=3, n_heads=4, d_ff=64, **shape
    )
    model = TransformerLM(config).to(dtype)
    model.init_weights(3)
    # Initial logits are nearly flat; sharper ones make greedy choices that rounding cannot turn.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(2.0)
    return model


@torch.no_grad()
def plain(model, ids, n, temperature=0.0, top_k=0, top_p=1.0, seed=0, limit=None) -> list[int]:
    """No cache: the whole window goes through the model for each token; when full, on from its newest half."""
    context = model.config.context_length
    window, out = list(ids)[-context:], []
    generator = seeded_generator(seed, "cpu")
    for _ in range(n):
        logits = model(torch.tensor([window]))[0, -1, :limit]
        out.append(int(sample(logits, temperature, top_k, top_p, generator)))
        window.append(out[-1])
        if len(window) > context:
            window = window[-max(1, context // 2) :]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_cached_logits_equal_plain_ones(shape, dtype, tolerance):
    model = make(dtype=dtype, **SHAPES[shape])
    ids = torch.randint(97, (16,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None])[0]
        for length in (1, 4, 15, 16):
            cache = KVCache(model.config, dtype=dtype)
            got = [prefill(model, cache, [0], [ids[:length].tolist()])]
            for position in range(length, 16):
                assert cache.lengths == [position]
                got.append(step(model, cache, [int(ids[position])]))
            torch.testing.assert_close(torch.cat(got), expected[length - 1 :], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_length_need_no_mask(shape):
    """Where attention is a kernel's, by whatever name: here the kernels' plain references."""
    model = make(kernels="auto", attention="sdpa", **SHAPES[shape])
    masks = []
    model.layers[0].register_forward_pre_hook(lambda _, args: masks.append(args[1]))
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids)[:, 4:]
        cache = KVCache(model.config, 2, torch.float64)
        got = [prefill(model, cache, [0, 1], ids[:, :5].tolist())]
        got += [step(model, cache, ids[:, position].tolist()) for position in range(5, 9)]
        torch.testing.assert_close(torch.stack(got, 1), expected, rtol=1e-9, atol=1e-9)
        assert masks == [None] * 6
        cache.lengths[1] = 3
        step(model, cache, [1, 2])
    assert masks[-1].tolist() == [[[[True] * 10]], [[[True] * 4 + [False] * 6]]]


def test_a_step_under_autocast_computes_as_the_model_does():
    model = make(dtype=torch.float32)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        list(generate(model, PROMPT, 3))
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_equals_plain_recomputation(shape):
    model = make(context_length=64, **SHAPES[shape])
    assert list(generate(model, PROMPT, 40, temperature=0)) == plain(model, PROMPT, 40)


@pytest.mark.parametrize("context_length", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("n_prompt", [1, 5, 8, 40])
def test_the_sliding_window_equals_plain_recomputation(context_length, n_prompt):
    model = make(context_length=context_length, n_kv_heads=2)
    prompt = torch.randint(97, (n_prompt,), generator=torch.Generator().manual_seed(4)).tolist()
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 6}
    assert list(generate(model, prompt, 45, **settings)) == plain(model, prompt, 45, **settings)


def test_the_window_always_holds_at_least_half_the_context():
    """What the model is fed: prefill, single tokens, and after a full cache half a context."""
    model, fed = make(context_length=8), []
    model.layers[0].register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    list(generate(model, PROMPT, 14, temperature=0))
    assert fed == [5, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1]


def test_sliding_and_cutting_are_said_once():
    model, lines = make(context_length=8), []
    list(generate(model, PROMPT, 3, on_slide=lines.append))
    assert lines == []
    list(generate(model, PROMPT, 30, on_slide=lines.append))
    assert len(lines) == 1
    assert "8 tokens" in lines[0]
    lines.clear()
    list(generate(model, list(range(20)), 1, on_slide=lines.append))
    assert lines == ["the prompt has 20 tokens; the model sees its last 8"]
    # Filling the context to the last place is no slide.
    lines.clear()
    assert len(list(generate(model, PROMPT, 4, on_slide=lines.append))) == 4
    assert lines == []


def test_a_prompt_too_long_keeps_its_last_tokens():
    model = make(context_length=8)
    prompt = list(range(30))
    assert list(generate(model, prompt, 1, temperature=0)) == list(generate(model, prompt[-8:], 1, temperature=0))


def test_seeds_reproduce_and_differ():
    model = make(context_length=32)
    first = list(generate(model, PROMPT, 20, seed=1))
    before = torch.get_rng_state()
    assert list(generate(model, PROMPT, 20, seed=1)) == first
    assert list(generate(model, PROMPT, 20, seed=2)) != first
    assert torch.equal(before, torch.get_rng_state())


def test_stop_ids_end_the_text_and_are_yielded():
    model = make(context_length=32)
    free = list(generate(model, PROMPT, 12, seed=3))
    stop = free[6]
    assert list(generate(model, PROMPT, 12, seed=3, stop_ids={stop})) == free[: free.index(stop) + 1]
    assert list(generate(model, PROMPT, 0)) == []


def test_padded_ids_are_never_drawn():
    model = make(context_length=16, vocab_size=128)
    # The model likes nothing better than the padding.
    with torch.no_grad():
        model.lm_head.weight[100:] = model.lm_head.weight[:28] * 50
    assert any(i >= 100 for i in generate(model, PROMPT, 30, seed=1))
    for temperature in (0.0, 1.0, 5.0):
        ids = list(generate(model, PROMPT, 60, temperature=temperature, seed=1, vocab_limit=100))
        assert max(ids) < 100
    assert list(generate(model, PROMPT, 20, temperature=0, vocab_limit=100)) == plain(model, PROMPT, 20, limit=100)


def test_an_empty_prompt_starts_at_the_start_id():
    model = make()
    assert list(generate(model, [], 5, temperature=0, start_id=9)) == list(generate(model, [9], 5, temperature=0))
    # A prompt that is there is not prefixed.
    assert list(generate(model, [4], 5, temperature=0, start_id=9)) == list(generate(model, [4], 5, temperature=0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [3, 97]}, "prompt token 1 is id 97, but the vocabulary has ids 0 to 96"),
        ({"ids": [-1]}, "prompt token 0 is id -1"),
        ({"ids": [90], "vocab_limit": 90}, "ids 0 to 89"),
        ({"vocab_limit": 98}, "the tokenizer knows 98 ids and the model 97"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_input_is_refused_at_the_call(changes, says):
    with pytest.raises(UserError) as caught:
        generate(make(), **{"ids": PROMPT, "max_tokens": 3, **changes})  # not even asked for a token
    assert says in str(caught.value)


def test_a_diverged_model_is_named():
    model = make()
    with torch.no_grad():
        model.ln_final.weight[0] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="not finite"):
            next(generate(model, PROMPT, 3, temperature=temperature))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_logit_that_is_not_finite_is_seen(dtype):
    logits = torch.full((2, 50_000), 60_000.0, dtype=dtype)  # their sum leaves the range of float16
    tokens = torch.tensor([49_999, 3])
    assert checked_tokens(tokens, logits) == [49_999, 3]
    for values in ([math.inf], [-math.inf], [math.nan], [math.inf, -math.inf]):
        bad = logits.clone()
        bad[1, 7 : 7 + len(values)] = torch.tensor(values, dtype=dtype)
        with pytest.raises(UserError, match="not finite"):
            checked_tokens(tokens, bad)


def test_the_callers_modes_are_left_alone():
    model = make(context_length=8)
    model.train()
    model.layers[1].eval()
    flags = [m.training for m in model.modules()]
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append((m.training, torch.is_inference_mode_enabled())))
    stream = generate(model, PROMPT, 12)
    for _ in range(5):
        next(stream)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert [m.training for m in model.modules()] == flags
    assert seen == [(False, True)] * 5
    del stream  # given up half-way
    gc.collect()
    # Training goes on as if nothing had been.
    model(torch.tensor([PROMPT]), torch.tensor([PROMPT])).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_run(dtype):
    ids = list(generate(make(dtype=dtype, context_length=8, n_kv_heads=2), PROMPT, 20, seed=1))
    assert len(ids) == 20


@pytest.mark.gpu
def test_on_the_gpu():
    model = make(context_length=16, n_kv_heads=2).cuda()
    cpu = make(context_length=16, n_kv_heads=2)
    assert list(generate(model, PROMPT, 40, temperature=0)) == list(generate(cpu, PROMPT, 40, temperature=0))
    before = torch.cuda.get_rng_state()
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5}
    first = list(generate(model, PROMPT, 40, **settings))
    assert list(generate(model, PROMPT, 40, **settings)) == first
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_the_cache_has_room_for_what_can_come_and_no_more(monkeypatch):
    made = []
    real = KVCache.__init__

    def noted(self, *args):
        real(self, *args)
        made.append(self.keys.shape[3])

    monkeypatch.setattr(KVCache, "__init__", noted)
    model = TransformerLM(ModelConfig(vocab_size=40, context_length=64, d_model=16, n_layers=1, n_heads=2, d_ff=32))
    for prompt, max_tokens in (([1, 2, 3], 5), ([1, 2, 3], 100), (list(range(40)) * 2, 1)):
        list(generate(model, prompt, max_tokens))
    assert made == [8, 64, 64]


def test_the_cache_keeps_rows_and_layers_apart():
    config = make(n_kv_heads=2).config
    cache = KVCache(config, batch_size=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(2, 3, 3, 2, 16, 8, dtype=torch.float64)  # keys and values, layers, rows, heads, places
    for rows in ([0, 1, 2], [2, 0]):
        cache.begin_prefill(rows, [3 + row for row in rows])
        for layer in range(3):
            new = torch.randn(2, len(rows), 2, 5, 8, dtype=torch.float64, generator=generator)
            got = cache.append(layer, *new)
            held[:, layer, rows, :, :5] = new
            assert torch.equal(got[0], new[0])
            assert torch.equal(got[1], new[1])
    assert cache.lengths == [3, 4, 5]
    assert torch.equal(torch.stack((cache.keys, cache.values)), held)
    cache.keep([2, 1])
    assert cache.lengths == [5, 4]
    assert torch.equal(torch.stack((cache.keys, cache.values)), held[:, :, [2, 1]])
