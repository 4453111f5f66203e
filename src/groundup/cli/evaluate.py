"""`groundup evaluate`: a run on its validation tokens."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import show
from groundup.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """Loss, perplexity and bits per byte of a run's model on validation tokens."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    step: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the newest)")] = None
    """Checkpoint to use."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: the run's own)")] = None
    """Token directory made with the run's tokenizer; its validation tokens are read."""
    batches: int = 0
    """Batches to read, spread evenly over the file; 0: every token."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: cuda where there is one."""
    json: Annotated[str, arg(metavar="[PATH]", help_behavior_hint="")] = ""
    """Write the result as JSON to PATH; without PATH, print it in place of the card."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.train import evaluate_run

    found, step = evaluate_run(args.run, args.step, args.device, args.data, args.batches)
    rows = {
        "step": f"{step:,}",
        "loss": f"{found.loss:.4f} nats per token",
        "perplexity": f"{found.perplexity:.2f}",
        "bits per byte": f"{found.bits_per_byte:.4f}",
        "tokens": f"{found.tokens:,}",
    }
    show({"step": step, **asdict(found)}, rows, args.json)
    return 0
