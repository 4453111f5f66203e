"""`groundup generate`: a run's model continues a prompt."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import check_utf8, emit, note
from groundup.cli.parse import parse
from groundup.cli.run_config import Step
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Let a run's model continue a prompt; the text appears as it is sampled, up to <|endoftext|>."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    prompt: str = ""
    """Text to continue; empty: a new document."""
    prompts: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Text file with a prompt a line, all continued at once; each gets the text it would get alone, line i with seed
    --seed + i."""
    json: Annotated[str, arg(metavar="[PATH]", help_behavior_hint="")] = ""
    """With --prompts: write prompts and texts as JSON to PATH; without PATH, print it in place of the texts."""
    max_tokens: int = 200
    """Most tokens to sample."""
    temperature: float = 1.0
    """Divides the logits: below 1 safer, above 1 wilder; 0: always the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together hold this probability; 1: all."""
    min_p: float = 0.0
    """Sample among the tokens that have at least this part of the likeliest one's probability; 0: all."""
    seed: int = 0
    """Seeds the sampling; the same seed gives the same text."""
    step: Step = None
    """Checkpoint to use; best: the one of the lowest validation loss, where the run keeps it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: cuda where there is one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights and of what is kept of the tokens; bf16 reads half the bytes and rounds."""
    compile: bool = False
    """Compile the step of one token first (most of a minute); worth it for thousands of tokens. On a Hopper GPU in bf16
    a single text of a small model has one kernel for the whole step instead, at once."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    check_utf8(args.prompt, "--prompt")
    if args.prompts is not None and args.prompt:
        raise UserError("--prompt gives one prompt and --prompts a file of them; leave one of them out")
    if args.json and args.prompts is None:
        raise UserError("--json is for --prompts FILE; a single text is printed as it is sampled")
    prompts = [args.prompt] if args.prompts is None else _lines(args.prompts)
    from groundup.generate import generate_text, generate_texts
    from groundup.train import load_run

    model, tokenizer, _, _ = load_run(args.run, step=args.step, device=args.device)
    if args.dtype == "bf16":
        model = model.bfloat16()
    settings: dict[str, Any] = {
        name: getattr(args, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    }
    settings["compiled"] = args.compile
    if args.prompts is not None:
        texts = generate_texts(model, tokenizer, prompts, **settings, on_slide=note)
        rows = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        listed = "\n\n---\n\n".join(row["prompt"] + row["text"] for row in rows)
        emit({"texts": rows}, listed, args.json, ensure_ascii=False)
        return 0
    pieces = generate_text(model, tokenizer, args.prompt, **settings, on_slide=note)
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path} is not valid UTF-8 at byte {error.start}") from None
    if not lines:
        raise UserError(f"--prompts {path} is empty; give a prompt a line")
    return lines
