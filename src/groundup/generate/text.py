"""Tokens to text while they arrive, and the whole way from a prompt to its continuation."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from groundup.generate.batch import generate_batch
from groundup.generate.engine import generate
from groundup.model import TransformerLM
from groundup.tokenizer import Tokenizer


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as its characters are complete; the pieces joined equal `tokenizer.decode` of the ids.

    A token may end inside a UTF-8 character: its bytes wait for the next token. Bytes that can never become a
    character, and a character cut by the end, appear as U+FFFD. `<|endoftext|>` is not printed.
    """
    return tokenizer.decode_iterable(token for token in ids if token != tokenizer.eot_id)


def generate_text(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    on_slide: Callable[[str], None] | None = None,
    min_p: float = 0.0,
    compiled: bool = False,
) -> Iterator[str]:
    """Stream the continuation of `prompt` (without the prompt), up to `<|endoftext|>` or `max_tokens` tokens.

    An empty prompt starts a new document. Raises UserError as `groundup.generate.generate` does, at the call.
    """
    end = tokenizer.eot_id
    ids = generate(
        model,
        tokenizer.encode(prompt),
        max_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        stop_ids=() if end is None else (end,),
        min_p=min_p,
        start_id=end,
        vocab_limit=tokenizer.vocab_size,
        on_slide=on_slide,
        compiled=compiled,
    )
    return stream_text(tokenizer, ids)


def generate_texts(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    on_slide: Callable[[str], None] | None = None,
    min_p: float = 0.0,
    compiled: bool = False,
) -> list[str]:
    """The continuations of many prompts as one batch; text i is that of `generate_text(…, seed=seed + i)`."""
    end = tokenizer.eot_id
    batch = generate_batch(
        model,
        [tokenizer.encode(prompt) for prompt in prompts],
        max_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        stop_ids=() if end is None else (end,),
        min_p=min_p,
        start_id=end,
        vocab_limit=tokenizer.vocab_size,
        on_slide=on_slide,
        compiled=compiled,
    )
    return ["".join(stream_text(tokenizer, ids)) for ids in batch]
