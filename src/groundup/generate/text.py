"""Tokens to text while they arrive, and the whole way from a prompt to its continuation."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from groundup.generate.engine import generate, generate_batch
from groundup.model import TransformerLM
from groundup.tokenizer import Tokenizer


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as its characters are complete; the pieces joined equal `tokenizer.decode` of the ids.

    A token may end inside a UTF-8 character: its bytes wait for the next token. Bytes that can never become a
    character, and a character cut by the end, appear as U+FFFD. `<|endoftext|>` is not printed.
    """
    return tokenizer.decode_iterable(token for token in ids if token != tokenizer.eot_id)


def bounds(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `generate` is told of the tokenizer: where a text ends, what an empty prompt starts from, how many ids."""
    end = tokenizer.eot_id
    return {"stop_ids": () if end is None else (end,), "start_id": end, "vocab_limit": tokenizer.vocab_size}


def generate_text(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    **settings: Any,
) -> Iterator[str]:
    """Stream the continuation of `prompt` (without the prompt), up to `<|endoftext|>` or `max_tokens` tokens.

    settings: temperature, top_k, top_p, min_p, seed, on_slide and compiled of `groundup.generate.generate`. An empty
    prompt starts a new document. Raises UserError as `generate` does, at the call.
    """
    ids = generate(model, tokenizer.encode(prompt), max_tokens, **bounds(tokenizer), **settings)
    return stream_text(tokenizer, ids)


def generate_texts(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    **settings: Any,
) -> list[str]:
    """The continuations of many prompts as one batch; text i is that of `generate_text(…, seed=seed + i)`."""
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    batch = generate_batch(model, ids, max_tokens, **bounds(tokenizer), **settings)
    return ["".join(stream_text(tokenizer, ids)) for ids in batch]
