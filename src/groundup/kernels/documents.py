"""Document masks as intervals: several documents in one sequence, none sees another.

A query of document a sees the keys [lo, hi) of document a, cut by causality and window; turned round, a key is seen
by an interval of queries. The kernels read these intervals instead of a (queries × keys) mask: 16 bytes a token.
"""

import torch
from jaxtyping import Int
from torch import Tensor


def document_ids(cumulative: Int[Tensor, "documents_plus_1"], length: int) -> Int[Tensor, "1 length"]:
    """Ids 0, 0, …, 1, 1, … from cumulative lengths (0, n_0, n_0 + n_1, …); no host synchronisation.

    Tokens past the last cumulative length form one more document.
    """
    place = torch.arange(length, device=cumulative.device)
    return torch.searchsorted(cumulative[1:].contiguous(), place, right=True)[None]


def intervals(
    q_ids: Int[Tensor, "batch n_q"], k_ids: Int[Tensor, "batch n_k"], causal: bool, window: int
) -> tuple[Int[Tensor, "2 batch n_q"], Int[Tensor, "2 batch n_k"]]:
    """(first, one past the last) key that each query sees, and query that sees each key, int32.

    Ids must not decrease along a sequence. Causal: within a document the last query is aligned with the last key.
    `window`: keys a query sees counting back from its own place, 0 for no limit.
    """
    q_ids, k_ids = q_ids.contiguous(), k_ids.contiguous()
    at_q, at_k = (torch.arange(ids.shape[1], device=ids.device) for ids in (q_ids, k_ids))
    # For a query: its document among the keys, and where its document ends among the queries.
    key_from, key_to = torch.searchsorted(k_ids, q_ids), torch.searchsorted(k_ids, q_ids, right=True)
    own_to = torch.searchsorted(q_ids, q_ids, right=True)
    query_from, query_to = torch.searchsorted(q_ids, k_ids), torch.searchsorted(q_ids, k_ids, right=True)
    other_to = torch.searchsorted(k_ids, k_ids, right=True)
    aligned_key = at_q + 1 - own_to + key_to
    """One past the key at the query's own place."""
    aligned_query = at_k + query_to - other_to
    q_lo, q_hi, k_lo, k_hi = key_from, key_to, query_from, query_to
    if causal:
        q_hi = torch.maximum(torch.minimum(aligned_key, key_to), key_from)
        k_lo = torch.minimum(torch.maximum(aligned_query, query_from), query_to)
    if window:
        q_lo = torch.minimum(torch.maximum(aligned_key - window, key_from), key_to)
        k_hi = torch.maximum(torch.minimum(aligned_query + window, query_to), query_from)
    return torch.stack((q_lo, q_hi)).int(), torch.stack((k_lo, k_hi)).int()
