"""`groundup evaluate`: a run on its validation tokens."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from groundup.cli.output import show
from groundup.cli.parse import parse
from groundup.cli.run_config import Step
from groundup.errors import UserError

WORST = 5
"""Documents on the card."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Loss, perplexity and bits per byte of a run's model on validation tokens."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    step: Step = None
    """Checkpoint to use; best: the one of the lowest validation loss, where the run keeps it."""
    data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: the run's own)")] = None
    """Token directory made with the run's tokenizer; its validation tokens are read."""
    batches: int = 0
    """Batches to read, spread evenly over the file; 0: every token."""
    by_document: FlagCreatePairsOff[bool] = False
    """Read each document for itself; give mean, median and the documents of highest loss. JSON holds every document."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: cuda where there is one."""
    json: Annotated[str, arg(metavar="[PATH]", help_behavior_hint="")] = ""
    """Write the result as JSON to PATH; without PATH, print it in place of the card."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    if args.by_document:
        return _by_document(args)
    from groundup.train import evaluate_run

    found, step = evaluate_run(args.run, args.step, args.device, args.data, args.batches)
    rows = {
        "step": f"{step:,}",
        "loss": f"{found.loss:.4f} nats per token",
        "perplexity": f"{found.perplexity:.2f}",
        "bits per byte": _bits(found.bits_per_byte),
        "tokens": f"{found.tokens:,}, {found.bytes:,} bytes of text",
    }
    show({"step": step, **asdict(found)}, rows, args.json)
    return 0


def _by_document(args: Args) -> int:
    if args.batches:
        raise UserError("--batches counts windows and --by-document reads whole documents; leave one of them out")
    from groundup.train import evaluate_run_documents

    found, step = evaluate_run_documents(args.run, args.step, args.device, args.data)
    losses = {"mean_loss": found.mean_loss, "median_loss": found.median_loss, "loss": found.loss}
    rows = {
        "step": f"{step:,}",
        "documents": f"{len(found.documents):,}",
        "mean": f"{found.mean_loss:.4f} nats per token, each document counting alike",
        "median": f"{found.median_loss:.4f}",
        "loss": f"{found.loss:.4f} nats per token, each token counting alike",
        "bits per byte": _bits(found.bits_per_byte),
        "tokens": f"{found.tokens:,}, {found.bytes:,} bytes of text",
    }
    for place, document in enumerate(found.worst(WORST), 1):
        rows[f"worst {place}"] = (
            f"{document.loss:.4f} over {document.tokens:,} tokens: document {document.index:,}, {document.beginning!r}"
        )
    total = {"bits_per_byte": found.bits_per_byte, "tokens": found.tokens, "bytes": found.bytes}
    worst = [document.index for document in found.worst(WORST)]
    every = [asdict(document) for document in found.documents]
    show({"step": step, **losses, **total, "worst": worst, "documents": every}, rows, args.json)
    return 0


def _bits(per_byte: float | None) -> str:
    return "no text" if per_byte is None else f"{per_byte:.4f}"
