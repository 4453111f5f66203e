"""A shuffled order without a list: a keyed permutation of 0 … n-1, computed index by index.

Swap-or-not (Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO 2012). A round pairs
index x with K - x mod n, K drawn from the key, and a hash of the pair's larger member says whether the two change
places; both come to the same answer, so a round is a permutation, and so is any number of them.

Cost: O(rounds) an index, about a millisecond for 512, and no table however many windows there are. 32 rounds: from 24
on, the orders of up to six windows and the places of pairs are uniform as far as a chi-squared test can tell.
Rejected: np.random.permutation (8 bytes a window, and numpy does not promise the same stream in its next version);
a Feistel network (far from uniform for the handful of windows of a small file); a multiplier coprime to n (its order
is visibly regular).

Hash: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), wrapping uint64 arithmetic.
"""

import numpy as np

ROUNDS = 32
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MASK = (1 << 64) - 1
_ROUND_CONSTANTS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 → uint64, a bijection whose output looks random: each input bit flips half the output bits."""
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def make_key(seed: int, stream: np.ndarray) -> np.ndarray:
    """A uint64 key for each number of `stream` (epochs, steps, …; integers ≥ 0) under `seed` (any integer)."""
    seed_key = mix(np.array([seed & _MASK], dtype=np.uint64))
    return mix(seed_key + stream.astype(np.uint64))


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where the permutation of 0 … size-1 chosen by `keys` takes each of `indices`.

    indices: integers in [0, size), 1-D; keys: uint64, one for each index or an array of one for all; size up to
    2^62. Returns uint64. For one key the map is one-to-one onto 0 … size-1.
    """
    n = np.uint64(size)
    place = indices.astype(np.uint64)
    round_keys = mix(keys ^ _ROUND_CONSTANTS[:, None])  # (rounds, keys)
    for round_key, total in zip(round_keys, round_keys % n, strict=True):
        partner = np.where(place <= total, total - place, total + n - place)
        swap = mix(round_key ^ np.maximum(place, partner)) >> np.uint64(63)
        place = np.where(swap == 1, partner, place)
    return place
