"""The keyed permutation against brute force: one-to-one, uniform, the same numbers for ever."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundup.data.permutation import make_key, permute

SIZES = [*range(1, 20), 31, 32, 33, 64, 97, 127, 128, 129, 1000, 1024, 4093, 65536]


@pytest.mark.parametrize("size", SIZES)
def test_one_to_one_onto_the_whole_range(size):
    order = permute(np.arange(size), size, np.array([5], dtype=np.uint64))
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), index=st.integers(0, 2**62))
def test_stays_in_range_at_any_size(size, key, index):
    keys = np.array([key], dtype=np.uint64)
    index = index % size
    assert 0 <= int(permute(np.array([index]), size, keys)[0]) < size


def test_matches_the_definition_with_plain_integers():
    """The same shuffle on Python integers, written from the paper's definition."""
    mask = 2**64 - 1

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    def swap_or_not(x, n, key):
        for number in range(1, 33):
            round_key = mix(key ^ (number * 0x9E3779B97F4A7C15 & mask))
            partner = (round_key - x) % n if round_key % n >= x else round_key % n + n - x
            if mix(round_key ^ max(x, partner)) >> 63:
                x = partner
        return x

    for n, key in ((1, 0), (7, 3), (1000, 2**63 + 11), (2**40 + 7, 12345)):
        indices = [i * n // 17 for i in range(17)]
        got = permute(np.array(indices), n, np.array([key], dtype=np.uint64)).tolist()
        # rounds pair x with round_key mod n - x (mod n)
        assert got == [swap_or_not(i, n, key) for i in indices]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_is_equally_likely(size):
    draws = 200 * math.factorial(size)
    keys = make_key(1, np.arange(draws))
    orders = np.stack([permute(np.full(draws, i), size, keys) for i in range(size)], axis=1)
    counts = Counter(map(tuple, orders.tolist()))
    freedom = math.factorial(size) - 1
    chi2 = sum((count - 200) ** 2 / 200 for count in counts.values()) + 200 * (freedom + 1 - len(counts))
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_do_not_stay_neighbours():
    size, draws = 1000, 20_000
    keys = make_key(2, np.arange(draws))
    first, second = (permute(np.full(draws, i), size, keys).astype(int) for i in (500, 501))
    assert not np.any(first == second)
    distance = np.bincount((second - first) % size, minlength=size)[1:]
    expected = draws / (size - 1)
    chi2 = ((distance - expected) ** 2 / expected).sum()
    assert abs(chi2 - (size - 2)) < 5 * math.sqrt(2 * size)


def test_keys_differ_by_seed_and_by_stream():
    streams = np.arange(1000)
    keys = np.concatenate([make_key(seed, streams) for seed in (-1, 0, 1, 2, 2**64 - 2)])
    assert len(np.unique(keys)) == len(keys)


def test_an_index_alone_gives_what_it_gives_among_others():
    keys = make_key(3, np.arange(50) // 20)
    whole = permute(np.arange(50) % 20, 20, keys)
    alone = [int(permute(np.array([i % 20]), 20, keys[i : i + 1])[0]) for i in range(50)]
    assert whole.tolist() == alone
