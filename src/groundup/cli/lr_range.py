"""`groundup lr-range`: which learning rate to train with."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from groundup.cli.output import note, show
from groundup.cli.run_config import parse_run
from groundup.cli.train import resolved
from groundup.config import RunConfig
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Find a learning rate: a short sweep from low to high, stopped when the loss diverges.

    The model is thrown away and no run is written or changed.
    """

    data_path: Annotated[str, arg(name="data", metavar="DIR", help_behavior_hint="")] = ""
    """Token directory; short for --data.path."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with any of the fields below."""
    size: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = ""
    """Named model shape, such as stories-17m, small or gpt2-124m."""
    start: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Start from the newest weights of this run, with its configuration, instead of fresh ones."""
    lowest: float = 1e-6
    """Learning rate of the first step."""
    highest: float = 1.0
    """Learning rate of the last step."""
    sweep: int = 200
    """Steps of the sweep, equally spaced in the logarithm of the learning rate."""
    plot: Annotated[Path, arg(metavar="FILE")] = Path("lr-range.png")
    """Picture to write, a PNG."""
    json: Annotated[str, arg(metavar="[PATH]", help_behavior_hint="")] = ""
    """The curve and the suggestion as JSON, to PATH or to standard output."""
    run: Annotated[RunConfig, arg(name="")] = field(default_factory=RunConfig)


def main(argv: list[str], prog: str) -> int:
    args = parse_run(Args, argv, prog, lambda first: first.start / "config.toml" if first.start else None)
    from groundup.parallel.processes import this_world

    if this_world().size > 1:
        raise UserError("a range test is one process: run it on one GPU, with the batch of one step")
    from groundup.train.resume import at_world_size

    given = at_world_size(args.run, 1) if args.start else args.run  # a run's batch is that of its processes
    config = resolved(_with_length(given, args.sweep))
    from groundup.report.lr_range import plot_lr_range
    from groundup.report.plots import check_png
    from groundup.train import load_run
    from groundup.train.job import build
    from groundup.train.lr_range import lr_range

    check_png(args.plot)
    job = build(config)
    if args.start:
        model, _, _, step = load_run(args.start, device="cpu")
        job.model.load_state_dict(model.state_dict())
        note(f"starting from step {step:,} of {args.start}")
    every = max(1, args.sweep // 20)

    def tell(step: int, lr: float, loss: float) -> None:
        if (step - 1) % every == 0:
            note(f"lr {lr:.2e}  loss {loss:.4f}")

    found = lr_range(job, args.lowest, args.highest, args.sweep, tell)
    plot_lr_range(found, args.plot)
    diverged = f"at {found.diverged:.2g}" if found.diverged else f"not up to {found.rates[-1]:.2g}"
    rows = {
        "suggestion": f"optim.lr = {found.suggestion:.2g}",
        "steepest fall": f"{found.steepest:.2g}",
        "lowest loss": f"{found.lowest:.2g}",
        "diverged": diverged,
        "plot": str(args.plot),
    }
    show(asdict(found), rows, args.json)
    return 0


def _with_length(config: RunConfig, steps: int) -> RunConfig:
    """A run's configuration needs a length to be resolved, which the sweep then does not ask for."""
    if config.train.steps or config.train.tokens:
        return config
    return replace(config, train=replace(config.train, steps=steps))
