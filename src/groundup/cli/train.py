"""`groundup train`: a new run, or an old one continued."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from groundup.cli import REQUEUE
from groundup.cli.run_config import parse_run
from groundup.config import RunConfig
from groundup.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train a model on token files, or go on with a run.

    A field's value is the last of: its default, the named --size, the --config file, its own flag.
    """

    out: Annotated[Path, arg(metavar="DIR")]
    """Run directory: configuration, metrics, checkpoints."""
    data_path: Annotated[str, arg(name="data", metavar="DIR", help_behavior_hint="")] = ""
    """Token directory; short for --data.path."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with any of the fields below."""
    size: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = ""
    """Named model shape, such as stories-17m, small or gpt2-124m."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest complete checkpoint of --out, with its configuration; --out without a run begins one."""
    allow_changed_data: FlagCreatePairsOff[bool] = False
    """With --resume: take the token files although they are not the ones of before (the tokenizer must be)."""
    nproc: int = 1
    """Processes to start on this machine, one a GPU. torchrun, mpirun and srun start their own: leave it at 1."""
    run: Annotated[RunConfig, arg(name="")] = field(default_factory=RunConfig)


def main(argv: list[str], prog: str) -> int:
    args = parse_args(argv, prog)
    if args.nproc == 1:
        return run_process(args)
    from groundup.parallel.launch import spawn
    from groundup.parallel.processes import this_world

    world = this_world()
    if args.nproc < 1:
        raise UserError(f"--nproc is {args.nproc}; it must be at least 1")
    if world.size > 1:
        raise UserError(f"{world.launcher} has started {world.size} processes already; leave --nproc out")
    return max(spawn(run_process, args.nproc, args))


def run_process(args: Args) -> int:
    """One process of the run; all of them get the same arguments."""
    # A resume takes what rank 0 finds: another machine may not see the run.
    config = args.run if args.resume or (args.out / "config.toml").exists() else resolved(args.run)
    from groundup.parallel.processes import this_world
    from groundup.train import ConsoleProgress, train

    result = train(
        config,
        args.out,
        resume=args.resume,
        progress=ConsoleProgress(),
        allow_changed_data=args.allow_changed_data,
    )
    if result.interrupted:
        return REQUEUE
    if this_world().rank:
        return 0
    loss = "" if result.valid_loss is None else f", validation loss {result.valid_loss:.4f}"
    best = ""
    if result.best_step not in (None, result.step):
        best = f", the best was {result.best_loss:.4f} at step {result.best_step:,}"
    print(f"{result.out}: {result.step:,} steps done{loss}{best}")
    return 0


def parse_args(argv: list[str], prog: str) -> Args:
    """The command line; with --resume its fields change only what they name in the saved configuration."""
    return parse_run(Args, argv, prog, lambda first: first.out / "config.toml" if first.resume else None)


def resolved(config: RunConfig) -> RunConfig:
    """Every derived field filled in from the token files and the number of processes."""
    from groundup.data import TokenData

    if not config.data.path:
        raise UserError("no token files: add --data DIR, a directory written by groundup tokenize")
    vocab_size = TokenData.open(config.data.path).vocab_size
    from groundup.parallel.processes import this_world  # torch comes with it

    return config.resolve(vocab_size, this_world().size)
