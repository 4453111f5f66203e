"""`groundup quickstart`: the whole path in one command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from groundup.cli import INTERRUPTED
from groundup.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """From nothing to a talking model: tokenizer, token files, training, loss curve, samples.

    Without --corpus the text is the source of Python's standard library, so nothing is downloaded. Interrupted, it
    saves; the same command goes on from there.
    """

    corpus: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Text file or folder to learn from in place of the standard library."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/quickstart")
    """Directory for everything that is made; also the run's directory."""
    vocab_size: int = 4096
    """Ids of the tokenizer: 256 bytes + merges + <|endoftext|>."""
    budget_seconds: float = 150.0
    """Time for all of it. A new run's model and steps are chosen to fit; a run that exists keeps its own."""
    threads: int = 0
    """Threads for tokenizer and training; 0: one a core."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8 in --corpus. strict: stop and name the byte; replace: put U+FFFD in its place."""
    fresh: FlagCreatePairsOff[bool] = False
    """Remove what an earlier quickstart left in --out and start anew."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.quickstart import Quickstart, quickstart

    return 0 if quickstart(Quickstart(**vars(args))) else INTERRUPTED
