"""`groundup export`: a run in Hugging Face's format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from groundup.cli.parse import parse
from groundup.cli.run_config import Step


@dataclass(frozen=True, kw_only=True)
class Args:
    """Write a run's model and tokenizer as Hugging Face's LlamaForCausalLM (with QK-norm Qwen3ForCausalLM), in float32:
    the same logits."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Directory to write; an earlier export is replaced, anything else is left alone."""
    step: Step = None
    """Checkpoint to use; best: the one of the lowest validation loss, where the run keeps it."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.train import export_run

    step = export_run(args.run, args.out, args.step)
    print(f"{args.out}: model and tokenizer in Hugging Face's format, from step {step:,} of {args.run}")
    return 0
