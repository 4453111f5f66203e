"""Second step: count the pairs once, then follow what each merge changes.

The naive trainer counts all pairs of all words before every merge, although a merge touches only the few words that
hold its pair. So keep, from merge to merge:

- `counts`: pair → how often it occurs;
- `holders`: pair → numbers of the words that hold it (or once held it: a word is looked at again before it is changed);
- a heap of (count, pair), the most frequent and of these the greatest on top. Counts change while an entry waits.
  An entry whose count is no longer true is dropped when it comes up; a pair that gets a new count gets a new entry.

Cost: O(all symbols) once, then O(symbols of the words that hold the pair) a merge and a logarithm for the heap. Looking
for the maximum over all pairs instead of keeping a heap is simpler and costs O(distinct pairs) a merge: with 30,000
merges and as many pairs that is what dominates.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from groundup.tokenizer.reference import Merge, count_words, merge_pair


class Greatest(tuple):
    """(count, pair), ordered backwards: Python's heaps keep the least element on top."""

    __slots__ = ()
    __lt__ = tuple.__gt__


def train(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> list[Merge]:
    """The merges, in the order they are learned; fewer than asked when no pair is left."""
    return train_on_words(count_words(texts, special_tokens), vocab_size - 256 - len(special_tokens))


def train_on_words(words: Counter[bytes], wanted: int) -> list[Merge]:
    """The first `wanted` merges of counted words."""
    symbols = [[bytes([byte]) for byte in word] for word in words]
    weights = list(words.values())
    counts: Counter[Merge] = Counter()
    holders: defaultdict[Merge, set[int]] = defaultdict(set)
    for number, word in enumerate(symbols):
        for pair in pairwise(word):
            counts[pair] += weights[number]
            holders[pair].add(number)
    heap = [Greatest((count, pair)) for pair, count in counts.items()]
    heapq.heapify(heap)

    merges: list[Merge] = []
    while heap and len(merges) < wanted:
        count, best = heapq.heappop(heap)
        if counts[best] != count:
            continue
        merges.append(best)
        changes: Counter[Merge] = Counter()
        for number in holders.pop(best):
            before = symbols[number]
            after = symbols[number] = merge_pair(before, best)
            if len(after) == len(before):
                continue  # the word has lost the pair to an earlier merge
            for pair in pairwise(before):
                changes[pair] -= weights[number]
            for pair in pairwise(after):
                changes[pair] += weights[number]
                holders[pair].add(number)
        for pair, change in changes.items():
            if change:
                counts[pair] += change
                if counts[pair]:
                    heapq.heappush(heap, Greatest((counts[pair], pair)))
        del counts[best]
    return merges
