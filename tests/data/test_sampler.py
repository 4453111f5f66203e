"""Batches against brute force: each window once an epoch, whatever the batch size, world size or resume step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groundup.data import WindowSampler, validation_windows
from groundup.errors import UserError


def tokens_of(n):
    return np.arange(n, dtype=np.uint32)


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 97])
@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("rest", [0, 4])
def test_each_window_once_an_epoch_across_batches(windows, batch, rest):
    context = 5
    sampler = WindowSampler(windows * context + 1 + rest, context, batch, seed=9)
    assert sampler.windows_per_epoch == windows
    epochs = 3
    steps = -(-epochs * windows // batch)
    seen = np.concatenate([sampler.starts(step) for step in range(steps)])
    for epoch in range(epochs):
        starts = seen[epoch * windows : (epoch + 1) * windows]
        assert sorted(starts.tolist()) == [w * context for w in range(windows)]


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        return tuple(WindowSampler(1001, 10, 100, seed).starts(epoch).tolist())

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(range(0, 1000, 10)) not in orders


def test_starts_of_a_seed_never_change():
    """A run resumed with a later version must see the same data."""
    shuffled = WindowSampler(1000, 8, 6, seed=42)
    assert [shuffled.starts(step).tolist() for step in (0, 20, 1000)] == GOLDEN_SHUFFLED
    uniform = WindowSampler(1000, 8, 6, seed=42, order="random")
    assert [uniform.starts(step).tolist() for step in (0, 20, 1000)] == GOLDEN_RANDOM


GOLDEN_SHUFFLED = [[352, 184, 112, 472, 960, 40], [648, 936, 952, 16, 480, 848], [904, 168, 984, 584, 208, 232]]
GOLDEN_RANDOM = [[324, 650, 230, 976, 767, 654], [37, 543, 229, 621, 987, 471], [847, 622, 254, 409, 3, 534]]


@pytest.mark.parametrize("order", ["shuffled", "random"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_ranks_together_are_the_batch_of_one_process(order, world):
    tokens = tokens_of(333)
    sampler = WindowSampler(len(tokens), 16, 12, seed=1, order=order)
    for step in (0, 1, 7, 10**9):
        whole = sampler.batch(tokens, step)
        parts = [sampler.batch(tokens, step, rank, world) for rank in range(world)]
        for index in (0, 1):
            assert np.array_equal(np.concatenate([part[index] for part in parts]), whole[index])


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_steps_do_not_depend_on_earlier_ones(order):
    tokens = tokens_of(333)
    unbroken = WindowSampler(len(tokens), 16, 12, seed=1, order=order)
    batches = [unbroken.batch(tokens, step) for step in range(10)]
    resumed = WindowSampler(len(tokens), 16, 12, seed=1, order=order)
    for step in (9, 3, 5):
        for a, b in zip(resumed.batch(tokens, step), batches[step], strict=True):
            assert np.array_equal(a, b)


@settings(max_examples=60)
@given(n=st.integers(2, 300), context=st.integers(1, 40), batch=st.integers(1, 40), step=st.integers(0, 10**12),
       order=st.sampled_from(["shuffled", "random"]))  # fmt: skip
def test_targets_are_the_next_tokens(n, context, batch, step, order):
    tokens = tokens_of(n)
    if n < context + 1:
        with pytest.raises(UserError, match=f"{n} tokens are fewer than one window of {context + 1}"):
            WindowSampler(n, context, batch)
        return
    sampler = WindowSampler(n, context, batch, order=order)
    inputs, targets = sampler.batch(tokens, step)
    assert inputs.shape == targets.shape == (batch, context)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1)  # token i has id i
    assert np.array_equal(inputs[:, 0], sampler.starts(step))
    assert inputs.min() >= 0
    assert targets.max() <= n - 1


def test_random_starts_are_uniform_from_first_to_last():
    n, context = 30, 9
    sampler = WindowSampler(n, context, 1000, seed=5, order="random")
    starts = np.concatenate([sampler.starts(step) for step in range(21)])
    counts = np.bincount(starts)
    assert len(counts) == n - context  # 0 … n - context - 1, both ends drawn
    expected = len(starts) / (n - context)
    assert ((counts - expected) ** 2 / expected).sum() < 20 + 5 * np.sqrt(40)
    assert len({tuple(sampler.starts(step)) for step in range(5)}) == 5


def test_one_window_is_enough():
    for order in ("shuffled", "random"):
        inputs, targets = WindowSampler(5, 4, 2, order=order).batch(tokens_of(5), 3)
        assert inputs.tolist() == [[0, 1, 2, 3]] * 2
        assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_refusals_name_the_numbers():
    with pytest.raises(UserError, match="at most 7"):
        WindowSampler(8, 8, 1)
    with pytest.raises(UserError, match="0 tokens are fewer"):
        WindowSampler(0, 8, 1)
    with pytest.raises(ValueError, match="holds 99"):
        WindowSampler(100, 8, 1).batch(tokens_of(99), 0)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place():
    tokens = np.zeros(41, dtype=np.uint16)
    tokens[23] = 777
    sampler = WindowSampler(41, 8, 5, vocab_size=500)
    with pytest.raises(UserError, match="token 23 has id 777, but vocab_size is 500"):
        sampler.batch(tokens, 0)
    with pytest.raises(UserError, match="token 23 has id 777"):
        list(validation_windows(tokens, 8, 2, vocab_size=500))
    WindowSampler(41, 8, 5, vocab_size=778).batch(tokens, 0)


@pytest.mark.parametrize("context", [1, 2, 5, 16])
@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 16, 17, 18, 100])
def test_evaluation_predicts_every_token_but_the_first_once(n, batch, context):
    batches = list(validation_windows(tokens_of(n), context, batch))
    predicted = []
    for inputs, targets in batches:
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == context
        valid = targets != -100
        assert np.array_equal(targets[valid], inputs[valid] + 1)
        predicted += targets[valid].tolist()
    assert predicted == list(range(1, n))
    assert all(len(inputs) == batch for inputs, _ in batches[:-1])
    padding = np.concatenate([(targets == -100).ravel() for _, targets in batches])
    assert padding.sum() == -(n - 1) % context


def test_evaluation_needs_two_tokens():
    with pytest.raises(UserError, match="1 validation tokens"):
        list(validation_windows(tokens_of(1), 4, 2))
