"""`groundup generate`: a run's model continues a prompt."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import check_utf8, note
from groundup.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """Let a run's model continue a prompt; the text appears as it is sampled, up to <|endoftext|>."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    prompt: str = ""
    """Text to continue; empty: a new document."""
    max_tokens: int = 200
    """Most tokens to sample."""
    temperature: float = 1.0
    """Divides the logits: below 1 safer, above 1 wilder; 0: always the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together hold this probability; 1: all."""
    seed: int = 0
    """Seeds the sampling; the same seed gives the same text."""
    step: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the newest)")] = None
    """Checkpoint to use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: cuda where there is one."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    check_utf8(args.prompt, "--prompt")
    from groundup.generate import generate_text
    from groundup.train import load_run

    model, tokenizer, _, _ = load_run(args.run, step=args.step, device=args.device)
    pieces = generate_text(
        model,
        tokenizer,
        args.prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        on_slide=note,
    )
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
