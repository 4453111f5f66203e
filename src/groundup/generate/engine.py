"""One token after another: prefill the prompt in one pass, then one position a step through the KV cache.

Cost of a step with n tokens held: the weights are read once and attention reads n keys and values, instead of the
whole model over n positions.

Past the context. When the cache is full the newest half of the context is kept, its keys and values are computed
afresh from position 0, and generation goes on. One such prefill of context_length / 2 positions pays for
context_length / 2 further tokens, so a token costs at most one extra position on average, and each token sees
between half and all of the context. Rejected: dropping one token a step, which needs a full pass for each token
(every position moves by one); and dropping only the oldest keys from the cache: upper layers' values still carry what
the dropped tokens said, so the logits would equal no plain forward pass of the model, and nothing could check them.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from groundup.errors import UserError
from groundup.generate.cache import KVCache
from groundup.generate.decode import CompiledDecode
from groundup.generate.sampling import check_sampling, sample, seeded_generator
from groundup.model import TransformerLM


def generate(
    model: TransformerLM,
    ids: Sequence[int],
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
) -> Iterator[int]:
    """Yield up to `max_tokens` new ids that continue the prompt `ids`.

    A stop id ends the sequence and is itself the last id yielded, so a caller can tell an end from a cut.
    start_id: what an empty prompt starts from (`<|endoftext|>`, which precedes every document but the first).
    vocab_limit: number of ids the tokenizer knows, where the model's vocabulary is padded larger; no id at or above it
    is ever drawn. on_slide: receives one line when the prompt is cut to the context, and one when the window first
    slides. compiled: the step of one token is compiled at its first use, once for all prompts (decode.py). Settings are
    checked at the call, not at the first token; between two tokens the model's training flags and torch's gradient mode
    are as the caller left them, and torch's global random state is never touched.

    Raises UserError for settings out of range, an id outside the vocabulary, an empty prompt without a start_id, and
    logits that are not numbers.
    """
    check_sampling(temperature, top_k, top_p, seed, min_p)
    if max_tokens < 0:
        raise UserError(f"max_tokens is {max_tokens}; it must be ≥ 0")
    limit = checked_limit(model.config.vocab_size, vocab_limit)
    window = prompt_window(ids, start_id, limit, model.config.context_length, on_slide)
    weight = next(model.parameters())
    generator = seeded_generator(seed, weight.device)

    def draw(logits: Float[Tensor, "vocab"]) -> int:
        token = sample(logits[:limit], temperature, top_k, top_p, generator, min_p)
        return checked_tokens(token[None], logits[None, :limit])[0]

    cache = KVCache(model.config, dtype=weight.dtype, device=weight.device)
    decode = CompiledDecode(model, cache.keys, cache.values) if compiled else None
    return _tokens(model, cache, window, max_tokens, draw, frozenset(stop_ids), on_slide, decode)


def _tokens(
    model: TransformerLM,
    cache: KVCache,
    window: list[int],
    max_tokens: int,
    draw: Callable[[Tensor], int],
    stop_ids: Collection[int],
    on_slide: Callable[[str], None] | None,
    decode: CompiledDecode | None,
) -> Iterator[int]:
    """The loop. `window`: the tokens the model sees; `pending`: those of them that the cache does not hold yet."""
    context_length, slid = cache.capacity, False
    modules, pending = list(model.modules()), window
    for _ in range(max_tokens):
        if len(window) > context_length:
            window = window[-newest_half(context_length) :]
            pending = window
            cache.reset()
            if on_slide is not None and not slid:
                on_slide(
                    f"past the context of {context_length} tokens: going on from the newest {len(window)} "
                    "each time it is full"
                )
            slid = True
        with inference(modules):
            token = draw(next_logits(model, pending, cache, decode))
        yield token
        if token in stop_ids:
            return
        window.append(token)
        pending = [token]


def next_logits(
    model: TransformerLM, tokens: list[int], cache: KVCache, decode: CompiledDecode | None = None
) -> Float[Tensor, "vocab"]:
    """Run the tokens that follow those in the cache, keep their keys and values; the logits of the token after them.

    The prefill of a prompt and the step of one token are this same call; a step is `decode`'s where it is given.
    """
    if decode is not None and len(tokens) == 1 and cache.length:
        logits = decode(tokens, [cache.length])
        cache.advance(1)
        return logits[0]
    ids = torch.tensor([tokens], device=cache.keys.device)
    with positions_only(model, torch.tensor([len(tokens) - 1], device=ids.device)):
        logits = model(ids, cache=cache)
    cache.advance(len(tokens))
    return logits[0, 0]


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
    if not isfinite(values.pop()):
        raise UserError("the model's logits are not finite numbers; its weights are damaged or its training diverged")
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
