"""`groundup plot`: loss curves of runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from groundup.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class Args:
    """Draw the training and validation loss of one or more runs as a PNG."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...", help_behavior_hint="")]
    """Run directories."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: RUN/loss.png)")] = None
    """Picture to write."""
    x: Literal["step", "tokens", "time"] = "step"
    """What the horizontal axis shows."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.report import plot_runs

    out = args.out or args.runs[0] / "loss.png"
    plot_runs(list(args.runs), out, x=args.x)
    print(out)
    return 0
