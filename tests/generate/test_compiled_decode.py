"""The compiled step against the plain one, how often it is compiled, and what runs ahead of the host."""

import gc
import math

import pytest
import torch
from test_batch import prompts
from test_engine import PROMPT, make
from torch._dynamo.utils import counters

from groundup.errors import UserError
from groundup.generate import KVCache, decode, generate, generate_batch
from groundup.generate.decode import CompiledDecode
from groundup.generate.engine import greedy_step, inference, prefill, step

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
    compiled = CompiledDecode(model, twin)
    with inference(model.modules()):
        prefill(model, cache, range(3), batch)
        prefill(model, twin, range(3), batch)
        for token in (4, 80, 0):
            plain = step(model, cache, [token, token + 1, token + 2])
            torch.testing.assert_close(step(model, twin, [token, token + 1, token + 2], compiled), plain)
        torch.testing.assert_close(twin.keys, cache.keys)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_fifty_prompt_lengths_compile_once(temperature):
    model = make(context_length=64)
    for length in range(1, 51):
        (prompt,) = prompts([length])
        expected = list(generate(model, prompt, 6, temperature, seed=length))
        assert list(generate(model, prompt, 6, temperature, seed=length, compiled=True)) == expected
    assert counters["stats"]["unique_graphs"] == 1


def test_the_ninth_batch_size_is_compiled_as_the_first():
    """Dynamo allows eight of a function, unless told otherwise."""
    model = make()
    for size in range(1, 10):
        found = generate_batch(model, [[1, 2]] * size, 3, 0, compiled=True)
        assert found == generate_batch(model, [[1, 2]] * size, 3, 0)
    assert counters["stats"]["unique_graphs"] == 9


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_batch_slides_and_stops_as_the_plain_one(temperature):
    model, batch = make(context_length=16, n_kv_heads=2), prompts([3, 16, 1, 30])
    settings = {"temperature": temperature, "top_k": 40, "seed": 3, "stop_ids": range(0, 97, 9)}
    assert generate_batch(model, batch, 40, compiled=True, **settings) == generate_batch(model, batch, 40, **settings)
    assert counters["stats"]["unique_graphs"] == 1


def test_padded_ids_are_never_drawn():
    model = make(context_length=16, vocab_size=128)
    with torch.no_grad():
        model.lm_head.weight[100:] = model.lm_head.weight[:28] * 50
    assert max(generate(model, [5, 6], 60, seed=1, vocab_limit=100, compiled=True)) < 100
    expected = list(generate(model, [5, 6], 60, 0, vocab_limit=100))
    assert list(generate(model, [5, 6], 60, 0, vocab_limit=100, compiled=True)) == expected


@pytest.fixture
def moves(monkeypatch):
    """[steps begun from the host's tokens, steps in all] of all that is greedy."""
    count, give, launch = [0, 0], CompiledDecode._give, CompiledDecode._launch

    def given(self, *args):
        count[0] += 1
        give(self, *args)

    def launched(self):
        count[1] += 1
        launch(self)

    monkeypatch.setattr(CompiledDecode, "_give", given)
    monkeypatch.setattr(CompiledDecode, "_launch", launched)
    return count


def test_a_greedy_text_is_begun_once_and_runs_ahead_by_one(moves):
    model = make(context_length=64)
    assert list(generate(model, PROMPT, 40, 0, compiled=True)) == list(generate(model, PROMPT, 40, 0))
    assert moves == [1, 40]  # the prefill gives one of the tokens; one step is in vain


@pytest.mark.parametrize("context_length", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("n_prompt", [1, 5, 40])
def test_greedy_past_the_context(context_length, n_prompt, moves):
    model, (prompt,) = make(context_length=context_length, n_kv_heads=2), prompts([n_prompt])
    expected = list(generate(model, prompt, 45, 0))
    assert list(generate(model, prompt, 45, 0, compiled=True)) == expected
    if context_length == 13:
        # A start after each prefill that leaves room. No step in vain where the cache is full, one at the end at most.
        first, each = 14 - min(n_prompt, 13), 14 - 6  # tokens from a prefill to the next one
        prefills = 1 + math.ceil((45 - first) / each)
        assert moves[0] == prefills - (n_prompt == 40)
        assert moves[1] - (45 - prefills) in (0, 1)


def test_rows_that_are_done_hold_nothing_up(moves):
    """One stops at once, near the end of its part of the cache, where it then stays; the others go on."""
    model, batch = make(context_length=48, n_kv_heads=2), prompts([40, 1, 7])
    free = generate_batch(model, batch, 30, 0)
    settings = {"stop_ids": {free[0][1]}}
    expected = generate_batch(model, batch, 30, 0, **settings)
    assert [len(ids) for ids in expected] == [2, 30, 30]
    assert generate_batch(model, batch, 30, 0, compiled=True, **settings) == expected
    assert moves == [1, 30]


def test_two_texts_at_once_and_one_given_up(moves):
    model, (first, second) = make(context_length=16), prompts([4, 9])
    expected = [list(generate(model, prompt, 30, 0)) for prompt in (first, second)]
    pair = [generate(model, prompt, 30, 0, compiled=True) for prompt in (first, second)]
    given_up = generate(model, first, 30, 0, compiled=True)
    assert [next(given_up) for _ in range(3)] == expected[0][:3]
    found = [(next(pair[0]), next(pair[1])) for _ in range(12)]
    del given_up
    gc.collect()
    found += zip(*pair, strict=True)
    assert [list(ids) for ids in zip(*found, strict=True)] == expected
    assert counters["stats"]["unique_graphs"] == 1


def begun(model, prompt):
    """A prefilled cache, its compiled step, another such cache, and the first token."""
    cache, twin = KVCache(model.config, 1, torch.float64), KVCache(model.config, 1, torch.float64)
    first, _ = (int(prefill(model, held, [0], [prompt]).argmax()) for held in (cache, twin))
    return cache, CompiledDecode(model, cache), twin, first


def likeliest(model, cache, tokens):
    return step(model, cache, tokens).argmax(-1).tolist()


def test_what_was_not_foreseen_starts_anew(moves):
    model = make()
    with inference(model.modules()):
        cache, compiled, twin, token = begun(model, PROMPT)
        tokens = greedy_step(cache, [token], compiled)
        assert tokens == likeliest(model, twin, [token])
        tokens[0] += 1  # another token than the one in flight, in the same list
        found = greedy_step(cache, tokens, compiled)
        assert found == likeliest(model, twin, tokens)
        assert moves == [2, 4]
        assert greedy_step(cache, found, compiled) == likeliest(model, twin, found)
        assert moves == [2, 5]
        tokens = greedy_step(cache, found, compiled)
        likeliest(model, twin, found)
        for held in (cache, twin):
            held.lengths = [3]  # back, and on from there by the step for any draw: what ran ahead is two places on
        torch.testing.assert_close(step(model, cache, [7], compiled), step(model, twin, [7]))
        cache.lengths, twin.lengths = [9], [9]
        assert greedy_step(cache, tokens, compiled) == likeliest(model, twin, tokens)
        torch.testing.assert_close(cache.keys[:, :, :, :10], twin.keys[:, :, :, :10])


def test_a_prefill_voids_what_ran_ahead(moves):
    """Even where token and place are those that were foreseen."""
    model = make()
    with inference(model.modules()):
        cache, compiled, twin, token = begun(model, PROMPT)
        found = greedy_step(cache, [token], compiled)
        for held in (cache, twin):
            prefill(model, held, [0], [[9, 60, 2, 33, 71, 12]])
        assert cache.lengths == [len(PROMPT) + 1]
        assert greedy_step(cache, found, compiled) == likeliest(model, twin, found)
    assert moves[0] == 2


def test_nothing_runs_ahead_beyond_the_cache(moves):
    model = make(context_length=8)
    with inference(model.modules()):
        cache, compiled, twin, token = begun(model, PROMPT)
        tokens = [token]
        for _ in range(3):
            expected = likeliest(model, twin, tokens)
            tokens = greedy_step(cache, tokens, compiled)
            assert tokens == expected
    assert moves == [1, 3]
    torch.testing.assert_close(cache.keys, twin.keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_lowest_of_equals_and_sees_what_is_not_finite(dtype, monkeypatch):
    model = make(dtype=dtype)
    large = 60_000.0 if dtype == torch.float16 else 3e38  # a sum of two leaves the range
    logits = torch.full((2, 97), large, dtype=dtype)
    logits[0, :5], logits[1, 0] = 0, 1
    monkeypatch.setattr(CompiledDecode, "_run", lambda self: logits)
    for values in ([], [math.inf], [-math.inf], [math.nan], [math.inf, -math.inf]):
        logits[1, 90 : 90 + len(values)] = torch.tensor(values, dtype=dtype)
        compiled = CompiledDecode(model, KVCache(model.config, 2, dtype), 90)
        assert compiled.greedy([1, 2], [3, 4]) == [5, 1]
        compiled = CompiledDecode(model, KVCache(model.config, 2, dtype), 97)
        if values:
            with pytest.raises(UserError, match="not finite"):
                compiled.greedy([1, 2], [3, 4])
        else:
            assert compiled.greedy([1, 2], [3, 4]) == [5, 1]


def test_a_model_that_diverges_is_named_and_modes_are_left_alone():
    model = make(context_length=32)
    model.train()
    stream = generate(model, PROMPT, 20, 0, compiled=True)
    for _ in range(4):
        next(stream)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert all(module.training for module in model.modules())
    model(torch.tensor([PROMPT]), torch.tensor([PROMPT])).backward()
    with torch.no_grad():
        model.ln_final.weight[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        next(stream), next(stream)


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


@pytest.mark.gpu
@pytest.mark.parametrize("changes", VARIANTS)
def test_greedy_on_the_gpu_runs_ahead(changes, moves):
    """Slides, stops and rows that are done; two texts at once; one given up; the graph follows the weights."""
    model = make(context_length=24, dtype=torch.float32, **changes).cuda()
    (prompt,) = prompts([5])
    free = list(generate(model, prompt, 100, 0))
    assert list(generate(model, prompt, 100, 0, compiled=True)) == free
    # At a start the inputs are given once, twice where the graph is recorded; 20 tokens fill the context, 13 then.
    assert moves[0] == 1 + 1 + math.ceil((100 - 20) / 13)
    stop = free[60]
    expected = list(generate(model, prompt, 100, 0, stop_ids={stop}))
    assert list(generate(model, prompt, 100, 0, stop_ids={stop}, compiled=True)) == expected
    batch, settings = prompts([3, 24, 1, 60]), {"stop_ids": range(0, 97, 19)}
    expected = generate_batch(model, batch, 100, 0, **settings)
    assert generate_batch(model, batch, 100, 0, compiled=True, **settings) == expected
    given_up = generate(model, batch[0], 50, 0, compiled=True)
    pair = [generate(model, one, 50, 0, compiled=True) for one in (prompt, batch[1])]
    next(given_up), next(given_up)
    found = [(next(pair[0]), next(pair[1])) for _ in range(10)]
    del given_up
    gc.collect()
    found += zip(*pair, strict=True)
    assert [list(ids) for ids in zip(*found, strict=True)] == [
        list(generate(model, one, 50, 0)) for one in (prompt, batch[1])
    ]


@pytest.mark.gpu
def test_greedy_on_the_gpu_over_a_changed_stream_and_a_damaged_model():
    model = make(context_length=32, dtype=torch.float32).cuda()
    expected, stream = list(generate(model, PROMPT, 60, 0)), generate(model, PROMPT, 60, 0, compiled=True)
    other, found = torch.cuda.Stream(), []
    for index in range(60):
        with torch.cuda.stream(other if index % 3 == 2 else torch.cuda.current_stream()):
            found.append(next(stream))
    assert found == expected
    stream = generate(model, PROMPT, 20, 0, compiled=True)
    next(stream), next(stream)
    with torch.no_grad():
        model.ln_final.weight[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        next(stream), next(stream), next(stream)
