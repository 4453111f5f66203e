"""Many prompts at once, of unequal lengths: the ids that each would get alone, and the weights are read once for all.

A row's tokens lie at the left of its own part of the cache, at the positions they would have alone.

Prefill: the prompts are padded on the right to the longest and go through the model in one pass. The mask is the plain
causal one: no token of a prompt comes after its padding, so none sees it; the padding's keys are overwritten later and
never read before. Decode: every row's newest token goes in at the row's own position, and a mask shows each row its own
keys only (decode.py: the model's forward knows one position for all rows).
A row whose window is full slides as in engine.py, by a prefill of that row's newest half.

Cost: prefill is batch × longest prompt. A step reads the weights once for all rows, and batch × longest row of keys.
Rows that are done ride along until half of them are; then the cache is copied without them, so at most half of the work
is idle and each row is copied at most log2(batch) times.
Rejected: padding on the left with shared positions (other positions than alone, so other float32 rounding, and the
longest prompt would make the short ones slide); one forward pass a prompt length (no batch once lengths differ).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.generate.decode import CompiledDecode, decode
from groundup.generate.engine import (
    checked_limit,
    checked_tokens,
    inference,
    newest_half,
    positions_only,
    prompt_window,
)
from groundup.generate.sampling import check_sampling, sample, seeded_generator
from groundup.model import TransformerLM


class RowCache:
    """Keys and values of many rows, each of its own length: (n_layers, batch, n_kv_heads, context_length, d_head).

    `begin_prefill` says which rows the next pass starts anew; `append` is what the model's attention calls then. A step
    of one token is decode.py's. Bytes: batch times those of cache.py.
    """

    def __init__(self, config: ModelConfig, batch_size: int, dtype: torch.dtype, device: torch.device | str):
        shape = (config.n_layers, batch_size, config.n_kv_heads, config.context_length, config.d_head)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = [0] * batch_size
        """Tokens held by each row, on the host."""
        self.length = 0
        """What the model's forward counts positions from; always 0, as only prefills go through it."""
        self._rows = torch.arange(batch_size, device=device)

    def begin_prefill(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The next pass starts these rows anew with so many tokens each."""
        self._rows = torch.tensor(rows, device=self.keys.device)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the k and v of a prefill, (rows, n_kv_heads, seq, d_head) after RoPE, and return them."""
        self.keys[layer, self._rows, :, : k.shape[2]] = k
        self.values[layer, self._rows, :, : k.shape[2]] = v
        return k, v

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are counted anew, in this order."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        self.lengths = [self.lengths[row] for row in rows]


def prefill(
    model: TransformerLM, cache: RowCache, rows: Sequence[int], windows: Sequence[list[int]]
) -> Float[Tensor, "rows vocab"]:
    """Start `rows` anew with the tokens of `windows`; the logits after each."""
    lengths = [len(window) for window in windows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for row, window in zip(ids, windows, strict=True):
        row[: len(window)] = torch.tensor(window)
    cache.begin_prefill(rows, lengths)
    device = cache.keys.device
    with positions_only(model, torch.tensor(lengths, device=device) - 1):
        return model(ids.to(device), cache=cache)[:, 0]


def step(
    model: TransformerLM, cache: RowCache, tokens: Sequence[int], compiled: CompiledDecode | None = None
) -> Float[Tensor, "batch vocab"]:
    """Give every row its next token; the logits after it (overwritten by the next step where `compiled` makes them)."""
    places = cache.lengths
    cache.lengths = [length + 1 for length in places]
    if compiled is not None:
        return compiled(tokens, places)
    # As many keys as the longest row has: views of the cache, so what is written there stays.
    keys, values = (held[:, :, :, : max(cache.lengths)] for held in (cache.keys, cache.values))
    return decode(model, keys, values, *torch.tensor([tokens, places], device=keys.device))


@dataclass
class _Row:
    """One prompt on its way."""

    index: int
    window: list[int]
    """The tokens that the model sees."""
    generator: torch.Generator
    out: list[int] = field(default_factory=list)
    done: bool = False


def generate_batch(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    *,
    min_p: float = 0.0,
    start_id: int | None = None,
    vocab_limit: int | None = None,
    on_slide: Callable[[str], None] | None = None,
    compiled: bool = False,
) -> list[list[int]]:
    """Continue every prompt; row i gets the ids of `generate(model, prompts[i], …, seed=seed + i)`.

    (Up to rounding: a batch sums in another order than a single row, which decides where two tokens are as good as
    equally likely.) Equal prompts get different texts, because every row has a random stream of its own. Raises
    UserError as `generate` does; `on_slide` gets its lines about prompts that are too long. `compiled`: as there; rows
    that are done then ride along to the end, so that shapes stay.
    """
    check_sampling(temperature, top_k, top_p, seed, min_p)
    if max_tokens < 0:
        raise UserError(f"max_tokens is {max_tokens}; it must be ≥ 0")
    limit = checked_limit(model.config.vocab_size, vocab_limit)
    weight = next(model.parameters())
    rows = [
        _Row(
            index,
            prompt_window(prompt, start_id, limit, model.config.context_length, on_slide),
            seeded_generator((seed + index) % 2**63, weight.device),
        )
        for index, prompt in enumerate(prompts)
    ]

    def draw(logits: Tensor, own: Sequence[_Row]) -> list[int]:
        logits = logits[:, :limit]
        tokens = sample(logits, temperature, top_k, top_p, [row.generator for row in own], min_p)
        return checked_tokens(tokens, logits)

    if rows and max_tokens:
        cache = RowCache(model.config, len(rows), weight.dtype, weight.device)
        with inference(model.modules()):
            compiled_step = CompiledDecode(model, cache.keys, cache.values) if compiled else None
            _continue(model, cache, rows, max_tokens, draw, frozenset(stop_ids), compiled_step)
    return [row.out for row in rows]


def _continue(
    model: TransformerLM,
    cache: RowCache,
    rows: list[_Row],
    max_tokens: int,
    draw: Callable[[Tensor, Sequence[_Row]], list[int]],
    stop_ids: Collection[int],
    compiled: CompiledDecode | None,
) -> None:
    """The loop: each round a token for every row that is not done."""
    logits = prefill(model, cache, range(len(rows)), [row.window for row in rows])
    for left in reversed(range(max_tokens)):
        for row, token in zip(rows, draw(logits, rows), strict=True):
            if not row.done:
                row.out.append(token)
                row.window.append(token)
                row.done = token in stop_ids
        alive = [place for place, row in enumerate(rows) if not row.done]
        if not alive or not left:
            return
        if 2 * len(alive) <= len(rows) and compiled is None:
            cache.keep(alive)
            rows = [rows[place] for place in alive]
        logits = _advance(model, cache, rows, compiled)


def _advance(model: TransformerLM, cache: RowCache, rows: Sequence[_Row], compiled: CompiledDecode | None) -> Tensor:
    """Logits after each row's newest token: one step for all, a prefill for those whose window is full."""
    context_length = model.config.context_length
    full = [place for place, row in enumerate(rows) if len(row.window) > context_length]
    for place in full:
        rows[place].window = rows[place].window[-newest_half(context_length) :]
    idle = set(full) | {place for place, row in enumerate(rows) if row.done}
    logits = None
    if len(idle) < len(rows):
        # Idle rows write over the last place they hold: it is rewritten below, or never read again.
        for place in idle:
            cache.lengths[place] -= 1
        logits = step(model, cache, [row.window[-1] for row in rows], compiled)
    again = [place for place in full if not rows[place].done]
    if again:
        restarted = prefill(model, cache, again, [rows[place].window for place in again])
        if logits is None:
            logits = restarted.new_zeros(len(rows), restarted.shape[-1])
        logits[again] = restarted
    assert logits is not None
    return logits
