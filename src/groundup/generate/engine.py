"""One token after another, for one prompt or many: prefill the prompts in one pass, then one position a step.

A prompt gets the ids that it would get alone, and the weights are read once for all. Prefill: the prompts are padded on
the right to the longest. The mask is the plain causal one: no token of a prompt comes after its padding, so none sees
it; the padding's keys are overwritten later and never read before. Step: every row's newest token goes in at the row's
own position and sees the row's own keys only (decode.py).

Cost: prefill is batch × longest prompt. A step reads the weights once for all rows and batch × longest row of keys and
values, instead of the whole model over n positions. Rows that are done ride along until half of them are; then the
cache is copied without them, so at most half of the work is idle and each row is copied at most log2(batch) times.

Past the context. When a row's part of the cache is full the newest half of its context is kept, its keys and values are
computed afresh from position 0, and generation goes on. One such prefill of context_length / 2 positions pays for
context_length / 2 further tokens, so a token costs at most one extra position on average, and each token sees
between half and all of the context.

Rejected: dropping one token a step, which needs a full pass for each token (every position moves by one); dropping only
the oldest keys from the cache: upper layers' values still carry what the dropped tokens said, so the logits would equal
no plain forward pass of the model, and nothing could check them; padding on the left with shared positions (other
positions than alone, so other float32 rounding, and the longest prompt would make the short ones slide); one forward
pass a prompt length (no batch once lengths differ).
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from groundup.errors import UserError
from groundup.generate.cache import KVCache
from groundup.generate.decode import CompiledDecode, decode
from groundup.generate.sampling import check_finite, check_sampling, sample, seeded_generator
from groundup.model import TransformerLM
from groundup.model.attention import plain_attention


def generate(
    model: TransformerLM, ids: Sequence[int], max_tokens: int, temperature: float = 1.0, **settings: Any
) -> Iterator[int]:
    """Yield up to `max_tokens` new ids that continue the prompt `ids`; `settings` and errors: see `begin`.

    A stop id ends the sequence and is itself the last id yielded, so a caller can tell an end from a cut. Between two
    tokens the model's training flags and torch's gradient mode are as the caller left them.
    """
    rows, rounds = begin(model, [ids], max_tokens, temperature, **settings)
    return (rows[0].out[-1] for _ in rounds)


def generate_batch(
    model: TransformerLM, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 1.0, **settings: Any
) -> list[list[int]]:
    """Continue every prompt; row i gets the ids of `generate(model, prompts[i], …, seed=seed + i)`.

    (Up to rounding: a batch sums in another order than a single row, which decides where two tokens are as good as
    equally likely.) Equal prompts get different texts, because every row has a random stream of its own. `settings` and
    errors: see `begin`.
    """
    rows, rounds = begin(model, prompts, max_tokens, temperature, **settings)
    for _ in rounds:
        pass
    return [row.out for row in rows]


@dataclass
class Row:
    """One prompt on its way."""

    window: list[int]
    """The tokens that the model sees."""
    generator: torch.Generator
    out: list[int] = field(default_factory=list)
    done: bool = False


@dataclass(frozen=True)
class Draw:
    """From logits to ids below `limit`, each row by its own random stream."""

    limit: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def __call__(self, logits: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> list[int]:
        logits, generators = logits[:, : self.limit], [row.generator for row in rows]
        return checked_tokens(sample(logits, self.temperature, self.top_k, self.top_p, generators, self.min_p), logits)


def begin(
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
) -> tuple[list[Row], Iterator[None]]:
    """(rows, rounds): each round gives every row that is not done its next id, in `out`.

    stop_ids: each ends its row, as the last id. start_id: what an empty prompt starts from (`<|endoftext|>`, which
    precedes every document but the first). vocab_limit: number of ids the tokenizer knows, where the model's vocabulary
    is padded larger; no id at or above it is ever drawn. on_slide: receives one line for each prompt that is cut to the
    context, and one when a window first slides. compiled: the step of one token is compiled at its first use, once for
    all prompts (decode.py); rows that are done then ride along to the end, so that shapes stay. Settings are checked at
    the call, not at the first token. Torch's global random state is never touched.

    Raises UserError for settings out of range, an id outside the vocabulary, an empty prompt without a start_id, and
    logits that are not numbers.
    """
    check_sampling(temperature, top_k, top_p, seed, min_p)
    if max_tokens < 0:
        raise UserError(f"max_tokens is {max_tokens}; it must be ≥ 0")
    limit = checked_limit(model.config.vocab_size, vocab_limit)
    device = next(model.parameters()).device
    rows = [
        Row(
            prompt_window(prompt, start_id, limit, model.config.context_length, on_slide),
            seeded_generator((seed + index) % 2**63, device),
        )
        for index, prompt in enumerate(prompts)
    ]
    draw = Draw(limit, temperature, top_k, top_p, min_p)
    return rows, _rounds(model, rows, max_tokens if rows else 0, draw, frozenset(stop_ids), on_slide, compiled)


def _rounds(
    model: TransformerLM,
    rows: list[Row],
    max_tokens: int,
    draw: Draw,
    stop_ids: Collection[int],
    on_slide: Callable[[str], None] | None,
    compiled: bool,
) -> Iterator[None]:
    """The loop."""
    weight, modules, context_length = next(model.parameters()), list(model.modules()), model.config.context_length
    needed = max((len(row.window) for row in rows), default=0) + max_tokens
    # Compiled, the step is that of one shape; else room for what can come: a context of 40,960 would take gigabytes.
    length = context_length if compiled else min(context_length, needed)
    cache = KVCache(model.config, len(rows), weight.dtype, weight.device, length)
    compiled_step = CompiledDecode(model, cache, draw.limit) if compiled else None
    for _ in range(max_tokens):
        for place, row in enumerate(rows):
            if len(row.window) > context_length and not row.done:
                row.window, cache.lengths[place] = row.window[-newest_half(context_length) :], 0
                if on_slide is not None:
                    on_slide(
                        f"past the context of {context_length} tokens: going on from the newest {len(row.window)} "
                        "each time it is full"
                    )
                on_slide = None
        with inference(modules):
            tokens = _next_tokens(model, cache, rows, draw, compiled_step)
        for place, token in tokens.items():
            row = rows[place]
            row.out.append(token)
            row.window.append(token)
            row.done = token in stop_ids
        yield
        alive = [place for place, row in enumerate(rows) if not row.done]
        if not alive:
            return
        if 2 * len(alive) <= len(rows) and not compiled:
            cache.keep(alive)
            rows = [rows[place] for place in alive]


def _next_tokens(
    model: TransformerLM, cache: KVCache, rows: Sequence[Row], draw: Draw, compiled: CompiledDecode | None
) -> dict[int, int]:
    """The next id of every row that is not done: by a step where the cache holds the row, else by a prefill."""
    alive = [place for place, row in enumerate(rows) if not row.done]
    held = [place for place in alive if cache.lengths[place]]
    again = [place for place in alive if not cache.lengths[place]]
    tokens: dict[int, int] = {}
    if held:
        # The other rows ride along and write over places that are never read: a prefill comes first, or nothing.
        cache.lengths = [0 if row.done else length for row, length in zip(rows, cache.lengths, strict=True)]
        newest = [row.window[-1] for row in rows]
        if compiled is not None and draw.temperature == 0:
            found = greedy_step(cache, newest, compiled)
            tokens = {place: found[place] for place in held}
        else:
            logits = step(model, cache, newest, compiled)
            tokens = _drawn(draw, logits if len(held) == len(rows) else logits[held], rows, held)
    if again:
        tokens |= _drawn(draw, prefill(model, cache, again, [rows[place].window for place in again]), rows, again)
    return tokens


def _drawn(draw: Draw, logits: Tensor, rows: Sequence[Row], places: Sequence[int]) -> dict[int, int]:
    return dict(zip(places, draw(logits, [rows[place] for place in places]), strict=True))


def prefill(
    model: TransformerLM, cache: KVCache, rows: Sequence[int], windows: Sequence[list[int]]
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
    model: TransformerLM, cache: KVCache, tokens: Sequence[int], compiled: CompiledDecode | None = None
) -> Float[Tensor, "batch vocab"]:
    """Give every row its next token; the logits after it (overwritten by the next step where `compiled` makes them)."""
    places = cache.lengths
    cache.lengths = [length + 1 for length in places]
    if compiled is not None:
        return compiled(tokens, places)
    # As many keys as the longest row has: views of the cache, so what is written there stays.
    keys, values = (held[:, :, :, : max(cache.lengths)] for held in (cache.keys, cache.values))
    if len(set(places)) == 1 and not plain_attention(model.config.attention, keys):
        return decode(model, keys, values, torch.tensor(tokens, device=keys.device), places[0])
    return decode(model, keys, values, *torch.tensor([tokens, places], device=keys.device))


def greedy_step(cache: KVCache, tokens: Sequence[int], compiled: CompiledDecode) -> list[int]:
    """`step` and the likeliest id after it. Rows of which the cache holds nothing ride along."""
    places = [length or -1 for length in cache.lengths]
    cache.lengths = [length + 1 for length in cache.lengths]
    return compiled.greedy(tokens, places)


@contextmanager
def positions_only(model: TransformerLM, positions: Int[Tensor, "batch"]) -> Generator[None]:
    """Inside, the model gives logits of one position a row, (batch, 1, vocab).

    A prompt's other logits are never read, and with a vocabulary of 50,000 they are the largest tensor of a prefill
    (200 kB a token) and much of its work. A hook before the final norm drops the positions: the model stays plain.
    """

    def keep(_: object, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        return x if x.shape[1] == 1 else x[torch.arange(len(x), device=x.device), positions].unsqueeze(1)

    handle = model.ln_final.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def newest_half(context_length: int) -> int:
    """Tokens kept when the window slides: half of the context, at least one."""
    return max(1, context_length // 2)


def checked_tokens(tokens: Int[Tensor, "rows"], logits: Float[Tensor, "rows vocab"]) -> list[int]:
    """The drawn ids on the host; the check that their logits are finite rides on the same transfer.

    Their sum is finite only if all are: one kernel, where looking at each takes five. float64 holds any id and any sum.
    """
    values = torch.cat([tokens.double(), logits.sum(dtype=torch.float64)[None]]).tolist()
    check_finite(values.pop())
    return [int(value) for value in values]


def checked_limit(vocab_size: int, vocab_limit: int | None) -> int:
    if vocab_limit is None:
        return vocab_size
    if not 0 < vocab_limit <= vocab_size:
        raise UserError(
            f"the tokenizer knows {vocab_limit} ids and the model {vocab_size}; use the tokenizer the model was "
            "trained with"
        )
    return vocab_limit


def prompt_window(
    ids: Sequence[int], start_id: int | None, limit: int, context_length: int, on_slide: Callable[[str], None] | None
) -> list[int]:
    """The checked prompt, cut to its newest `context_length` tokens."""
    window = list(ids)
    if not window and start_id is None:
        raise UserError("the prompt is empty and there is no <|endoftext|> token to start from; give a prompt")
    if not window and start_id is not None:
        window = [start_id]
    for position, token in enumerate(window):
        if not 0 <= token < limit:
            raise UserError(
                f"prompt token {position} is id {token}, but the vocabulary has ids 0 to {limit - 1}; "
                "encode the prompt with the model's own tokenizer"
            )
    if len(window) > context_length and on_slide is not None:
        on_slide(f"the prompt has {len(window)} tokens; the model sees its last {context_length}")
    return window[-context_length:]


@contextmanager
def inference(modules: Iterable[nn.Module]) -> Generator[None]:
    """Evaluation mode of a model's modules, and no autograd, for one step.

    Around the step and not around the loop: a generator that yields inside `inference_mode` would leave it on in its
    caller's code. Only the modules that were training are set back. A loop lists the modules once: walking through the
    model takes longer than a small one's step (0.2 ms for 12 layers, against 10 µs for the list).
    """
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
