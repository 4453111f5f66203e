"""A batch of unequal prompts against each prompt alone, in float64."""

import pytest
import torch
from test_engine import SHAPES, make

from groundup.errors import UserError
from groundup.generate import KVCache, generate, generate_batch
from groundup.generate.engine import prefill, step


def prompts(lengths, vocab=97):
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def alone(model, batch, n, seed=0, **settings):
    return [list(generate(model, prompt, n, seed=seed + i, **settings)) for i, prompt in enumerate(batch)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_prefill_and_steps_equal_the_plain_models(shape):
    model = make(**SHAPES[shape])
    batch = prompts([1, 9, 4, 12])
    with torch.no_grad():
        cache = KVCache(model.config, 4, torch.float64, "cpu")
        got = prefill(model, cache, range(4), batch)
        for token in (None, 3, 50, 8):
            if token is not None:
                got = step(model, cache, [token + row for row in range(4)])
                batch = [[*prompt, token + row] for row, prompt in enumerate(batch)]
            expected = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt in batch])
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
            assert cache.lengths == [len(prompt) for prompt in batch]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_rows_equal_one_by_one(shape):
    model = make(context_length=64, **SHAPES[shape])
    batch = prompts([5, 1, 20, 13, 2])
    assert generate_batch(model, batch, 30, temperature=0) == alone(model, batch, 30, temperature=0)


@pytest.mark.parametrize("context_length", [1, 2, 7, 16])
def test_sampled_rows_slide_each_at_its_own_time(context_length):
    model = make(context_length=context_length, n_kv_heads=2)
    batch = prompts([3, 16, 1, 40, 9])
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
    lines = []
    found = generate_batch(model, batch, 45, seed=5, on_slide=lines.append, **settings)
    assert found == alone(model, batch, 45, seed=5, **settings)
    assert len([line for line in lines if line.startswith("the prompt has")]) == sum(
        len(prompt) > context_length for prompt in batch
    )
    assert len([line for line in lines if line.startswith("past the context")]) == 1


def test_rows_that_stop_leave_the_others_alone():
    """Several stops at different times, so that the cache is copied without the rows that are done."""
    model = make(context_length=24)
    batch = prompts([4, 7, 1, 11, 3, 3, 6])
    stops = set(range(0, 97, 9))
    found = generate_batch(model, batch, 60, seed=2, stop_ids=stops)
    assert found == alone(model, batch, 60, seed=2, stop_ids=stops)
    assert len({len(ids) for ids in found}) > 3
    assert all(ids[-1] in stops and not stops & set(ids[:-1]) for ids in found)


def test_equal_prompts_differ_and_greedy_ones_do_not():
    model = make(context_length=32)
    first, second = generate_batch(model, [[5, 6], [5, 6]], 20, seed=1)
    assert first != second
    first, second = generate_batch(model, [[5, 6], [5, 6]], 20, temperature=0)
    assert first == second


def test_padded_ids_are_never_drawn_and_empty_prompts_start():
    model = make(context_length=16, vocab_size=128)
    with torch.no_grad():
        model.lm_head.weight[100:] = model.lm_head.weight[:28] * 50
    batch = [[], [7, 8, 9]]
    found = generate_batch(model, batch, 60, seed=1, vocab_limit=100, start_id=4)
    assert max(map(max, found)) < 100
    assert found == alone(model, batch, 60, seed=1, vocab_limit=100, start_id=4)


def test_nothing_asked_is_nothing_done():
    assert generate_batch(make(), [], 5) == []
    assert generate_batch(make(), [[1], [2]], 0) == [[], []]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompts": [[1], []]}, "the prompt is empty"),
        ({"prompts": [[1], [3, 97]]}, "prompt token 1 is id 97"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
    ],
)
def test_bad_input_is_refused(changes, says):
    with pytest.raises(UserError, match=says):
        generate_batch(make(), **{"prompts": [[1]], "max_tokens": 3, **changes})


def test_modes_and_the_global_stream_are_left_alone():
    model = make(context_length=8)
    model.train()
    before = torch.get_rng_state()
    generate_batch(model, prompts([3, 5]), 12)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())
    model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()


def test_a_diverged_model_is_named():
    model = make()
    with torch.no_grad():
        model.ln_final.weight[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        generate_batch(model, [[1], [2, 3]], 3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_prefill_makes_the_logits_of_its_last_token_only(tied):
    model, seen = make(tie_embeddings=tied), []
    model.ln_final.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))
    ids = prompts([10])[0]
    with torch.no_grad():
        whole = model(torch.tensor([ids]))[0, -1]
        found = prefill(model, KVCache(model.config, 2, torch.float64, "cpu"), [0, 1], [ids, ids[:3]])
        torch.testing.assert_close(found[0], whole)
        model(torch.tensor([ids]))
    assert seen == [(1, 10, 32), (2, 1, 32), (1, 10, 32)]
