"""Sampling against brute force over all subsets and against the exact probabilities."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groundup.errors import UserError
from groundup.generate.sampling import (
    check_sampling,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
    scale_by_temperature,
    seeded_generator,
)


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


def smallest_nuclei(probabilities: list[float], p: float) -> list[set[int]]:
    """All sets of the smallest size whose probability reaches p, the heaviest of them, by trying every subset."""
    ids = range(len(probabilities))
    for size in range(1, len(probabilities) + 1):
        sums = {c: math.fsum(probabilities[i] for i in c) for c in combinations(ids, size)}
        if max(sums.values()) >= p:
            heaviest = max(sums.values())
            return [set(c) for c, total in sums.items() if math.isclose(total, heaviest, rel_tol=1e-12)]
    raise AssertionError("no set reaches p")


# Weights are integers and p a half-integer share of their sum: no subset's sum is within rounding of p.
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 10_000))
def test_top_p_equals_brute_force(weights, where):
    total = sum(weights)
    p = (where % total + 0.5) / total
    logits = torch.tensor(weights, dtype=torch.float64).log()
    probabilities = [w / total for w in weights]
    assert set(kept(keep_top_p(logits, p))) in smallest_nuclei(probabilities, p)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.01, [1]),
        (0.59, [1]),
        (0.61, [1, 3]),
        (0.89, [1, 3]),
        (0.91, [1, 2, 3]),
        (0.999, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_crossing_token_and_never_nothing(p, expected):
    logits = torch.tensor([0.02, 0.6, 0.08, 0.3]).log()
    assert kept(keep_top_p(logits, p)) == expected


def test_top_p_ties_take_the_lower_ids():
    assert kept(keep_top_p(torch.zeros(10), 0.25)) == [0, 1, 2]
    assert kept(keep_top_p(torch.zeros(4), 0.5)) == [0, 1]  # reached exactly is reached
    many = torch.zeros(3, 5000)
    outside = torch.isinf(keep_top_p(many, 0.4999))
    assert (outside.sum(-1) == 2500).all()
    assert not outside[:, :2500].any()


def test_top_p_works_on_rows_of_any_shape():
    logits = torch.randn(2, 3, 17, generator=torch.Generator().manual_seed(0))
    whole = keep_top_p(logits, 0.7)
    for i in range(2):
        for j in range(3):
            assert torch.equal(whole[i, j], keep_top_p(logits[i, j], 0.7))
    # What stays is untouched.
    assert torch.equal(whole[torch.isfinite(whole)], logits[torch.isfinite(whole)])


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 15))
def test_top_k_equals_a_stable_sort(values, k):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    expected = sorted(order[:k]) if k else list(range(len(values)))
    assert kept(keep_top_k(torch.tensor(values, dtype=torch.float32), k)) == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 79))
def test_min_p_equals_brute_force(weights, half):
    p = half / 83  # a prime: no ratio of two weights up to 40 equals it
    logits = torch.tensor(weights, dtype=torch.float64).log()
    probabilities = [w / sum(weights) for w in weights]
    expected = [i for i, probability in enumerate(probabilities) if probability >= p * max(probabilities)]
    assert kept(keep_min_p(logits, p)) == expected


def test_min_p_keeps_what_it_should_on_rows_of_any_shape():
    logits = torch.randn(2, 3, 17, generator=torch.Generator().manual_seed(0))
    assert keep_min_p(logits, 0.0) is logits
    whole = keep_min_p(logits, 0.3)
    probabilities = logits.double().softmax(-1)
    outside = probabilities < 0.3 * probabilities.amax(-1, keepdim=True)
    assert torch.equal(whole, logits.masked_fill(outside, -math.inf))
    assert torch.isfinite(keep_min_p(logits, 1.0)).sum() == 6  # the likeliest of each row
    # With everything but one ruled out already, that one stays.
    assert kept(keep_min_p(torch.tensor([-math.inf, 2.0, -math.inf]), 1.0)) == [1]


def test_the_order_of_min_p():
    # After the temperature: 0.1 is a fifth of 0.5, and at temperature 1/2 a twenty-fifth.
    logits = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64).log()
    draws = {
        t: {sample(logits, t, min_p=0.1, generator=seeded_generator(s, "cpu")).item() for s in range(80)}
        for t in (1.0, 0.5)
    }
    assert draws == {1.0: {0, 1, 2}, 0.5: {0, 1}}
    # After top-p: a nucleus of 0.52 needs 0.5 and 0.4. After min-p 0.5 it would be 0.5 of 0.9, more than 0.52, alone.
    both = {sample(logits, 1.0, 0, 0.52, seeded_generator(s, "cpu"), 0.5).item() for s in range(80)}
    assert both == {0, 1}


def test_rows_with_generators_of_their_own_draw_as_if_alone():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    together = sample(logits, 1.0, generator=[seeded_generator(s, "cpu") for s in range(5)])
    alone = [sample(row, 1.0, generator=seeded_generator(s, "cpu")).item() for s, row in enumerate(logits)]
    assert together.tolist() == alone


def test_top_p_counts_after_top_k_and_temperature():
    # p = 0.5 of the whole would need three tokens; of the two that top-k leaves, the first alone has 0.6.
    logits = torch.tensor([0.21, 0.14, 0.13] + [0.13] * 4, dtype=torch.float64).log()
    draws = [sample(logits, 1.0, 2, 0.5, seeded_generator(s, "cpu")).item() for s in range(40)]
    assert set(draws) == {0}
    # At temperature 0.25 the first token alone passes one half; at 1 it has 0.3.
    logits = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    assert {sample(logits, 0.25, 0, 0.5, seeded_generator(s, "cpu")).item() for s in range(40)} == {0}
    assert {sample(logits, 1.0, 0, 0.45, seeded_generator(s, "cpu")).item() for s in range(60)} == {0, 1}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 4, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.9)]
)
def test_frequencies_follow_the_probabilities(temperature, top_k, top_p):
    """chi² over 40,000 draws with a fixed seed; the exact probabilities come from plain Python."""
    logits = [2.0, 0.5, -1.0, 1.5, 0.0, 1.0, -0.5, 0.25]
    weights = [math.exp(l / temperature) for l in logits]
    order = sorted(range(8), key=lambda i: -weights[i])[: top_k or 8]
    nucleus, reached = [], 0.0
    for i in order:
        nucleus.append(i)
        reached += weights[i] / sum(weights[j] for j in order)
        if reached >= top_p:
            break
    total = sum(weights[i] for i in nucleus)

    n = 40_000
    rows = torch.tensor(logits).expand(n, -1)
    counts = torch.bincount(sample(rows, temperature, top_k, top_p, seeded_generator(3, "cpu")), minlength=8).tolist()
    assert sum(counts[i] for i in range(8) if i not in nucleus) == 0
    chi2 = sum((counts[i] - n * weights[i] / total) ** 2 / (n * weights[i] / total) for i in nucleus)
    # 99.9% quantiles of chi² for 1 to 7 degrees of freedom (any table).
    assert chi2 < [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32][len(nucleus) - 2]


def test_greedy_takes_the_first_of_the_largest_and_draws_nothing():
    generator = seeded_generator(0, "cpu")
    before = generator.get_state()
    assert sample(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]]), 0.0, generator=generator).tolist() == [1, 0]
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-300])
def test_tiny_temperatures_approach_greedy_without_nan(temperature):
    logits = torch.tensor([80.0, 81.0, -90.0, 12.0])
    assert torch.isfinite(scale_by_temperature(logits, temperature)[1])
    for seed in range(20):
        assert sample(logits, temperature, 0, 0.9, seeded_generator(seed, "cpu")).item() == 1


def test_tokens_ruled_out_are_never_drawn():
    logits = torch.full((20_000, 50), -math.inf)
    logits[:, 7] = -1e4
    assert (sample(logits, 1.0, generator=seeded_generator(1, "cpu")) == 7).all()


def test_the_seed_decides_and_the_global_stream_rests():
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    first = sample(logits, generator=seeded_generator(11, "cpu"))
    assert torch.equal(first, sample(logits, generator=seeded_generator(11, "cpu")))
    assert not torch.equal(first, sample(logits, generator=seeded_generator(12, "cpu")))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((-0.1, 0, 1.0), "temperature is -0.1; it must be a number ≥ 0"),
        ((math.nan, 0, 1.0), "temperature is nan"),
        ((math.inf, 0, 1.0), "temperature is inf"),
        ((1.0, -1, 1.0), "top_k is -1; it must be ≥ 0"),
        ((1.0, 0, 0.0), "top_p is 0.0; it must be in (0, 1]"),
        ((1.0, 0, 1.01), "top_p is 1.01"),
        ((1.0, 0, math.nan), "top_p is nan"),
        ((1.0, 0, 1.0, -1), "seed is -1"),
        ((1.0, 0, 1.0, 0, -0.1), "min_p is -0.1; it must be in [0, 1]"),
        ((1.0, 0, 1.0, 0, math.nan), "min_p is nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(UserError) as caught:
        check_sampling(*settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
