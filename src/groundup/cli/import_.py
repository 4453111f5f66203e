"""`groundup import`: a run from a model in Hugging Face's format (`import` is Python's word, hence the file's name)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from groundup.cli.output import note
from groundup.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """Make a run from a LlamaForCausalLM or Qwen3ForCausalLM with a byte-level BPE tokenizer: evaluate, sample, chat.

    It cannot be resumed: the format holds no optimizer state.
    """

    directory: Annotated[Path, Positional, arg(metavar="DIR")]
    """Directory with config.json, model.safetensors and tokenizer.json; nothing is downloaded."""
    out: Annotated[Path, arg(metavar="RUN")]
    """Run directory to make."""
    data: Annotated[Path | None, arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Token directory made with the model's tokenizer, for evaluate; left out, evaluate asks for its own --data."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.train import import_run

    shape = import_run(args.directory, args.out, args.data, note).model
    print(
        f"{args.out}: {shape.n_layers} layers of {shape.d_model}, {shape.n_heads} heads over {shape.n_kv_heads}, "
        f"context {shape.context_length}, vocabulary {shape.vocab_size:,}"
    )
    return 0
