"""`groundup ablate`: what each part of a recipe is worth."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from groundup.cli import REQUEUE
from groundup.cli.output import note
from groundup.cli.run_config import parse_run
from groundup.cli.train import resolved
from groundup.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train a recipe and its variations, one change each, and compare their validation losses.

    The same command again goes on where it stopped; runs that are finished are only read.
    """

    config: Annotated[Path, Positional, arg(metavar="RECIPE", help_behavior_hint="")]
    """TOML file with any of the fields below."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Directory of the runs, the table (ablation.md, ablation.json) and the curves (ablation.png)."""
    data_path: Annotated[str, arg(name="data", metavar="DIR", help_behavior_hint="")] = ""
    """Token directory; short for --data.path."""
    vary: Annotated[str, arg(metavar="A,B,...")] = (
        "norm,rope,ffn,qk_norm,softcap,tie,norm_decay,optimizer,precision,size"
    )
    """What to vary; also: embedding_decay, schedule."""
    steps: int = 0
    """Steps of every run; 0: the recipe's. A longer warm-up is cut to a tenth of them."""
    run: Annotated[RunConfig, arg(name="")] = field(default_factory=RunConfig)


def main(argv: list[str], prog: str) -> int:
    args = parse_run(Args, argv, prog)
    from groundup.report.ablation import ablation_table, write_ablation
    from groundup.train import ConsoleProgress
    from groundup.train.ablate import ablate, changed, shortened, variations

    base = shortened(args.run, args.steps)
    found = variations(base, args.vary.split(","))
    for variation in found:
        resolved(changed(base, variation.changes))  # whatever is wrong is said before the first run
    outcomes = ablate(base, found, args.out, ConsoleProgress, note)
    if outcomes is None:
        note("interrupted: the same command goes on")
        return REQUEUE
    files = write_ablation(outcomes, args.out)
    print(ablation_table(outcomes))
    print(", ".join(map(str, files)))
    return 0
