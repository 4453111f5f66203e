"""Where a run's fields come from: defaults < --size < --config < flags, and on a resume the saved run first."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import arg

from groundup.cli.parse import parse
from groundup.config import RunConfig, load_toml, size

T = TypeVar("T")

Step = Annotated[int | Literal["best"] | None, arg(metavar="INT|best", help_behavior_hint="(default: the newest)")]
"""The option --step of commands that read a checkpoint; best: the lowest validation loss, where the run keeps it."""


def parse_run(kind: type[T], argv: Sequence[str], prog: str, saved: Callable[[T], Path | None] = lambda _: None) -> T:
    """A command line with the fields of a run: `kind` has run, config and data_path, and may have size.

    It is read twice: once to learn where the defaults come from, then on top of those. `saved`: the config.toml that is
    the base where it exists, so that a flag changes only what it names.
    """
    first: Any = parse(kind, argv, prog)
    path = saved(first)
    base = load_toml(path, RunConfig) if path is not None and path.exists() else RunConfig()
    base = layered(base, getattr(first, "size", ""), first.config)
    # A flag that is on by default has no spelling (--resume), so the second reading begins with all of them off.
    off = {f.name: f.default for f in fields(first) if f.default is False}
    args: Any = parse(kind, argv, prog, default=replace(first, run=base, **off))
    run = newer_length(base, args.run)
    if args.data_path:
        run = replace(run, data=replace(run.data, path=args.data_path))
    return replace(args, run=run)


def layered(base: RunConfig, size_name: str = "", config_path: Path | None = None) -> RunConfig:
    """`base` with a named model size and then a TOML file laid over it; both may be left out."""
    if size_name:
        base = replace(base, model=size(size_name))
    if config_path is None:
        return base
    given = load_toml(config_path, RunConfig)  # checks every key and type
    return newer_length(base, _overlay(base, given, tomllib.loads(config_path.read_text(encoding="utf-8"))))


def newer_length(base: RunConfig, config: RunConfig) -> RunConfig:
    """`config`, laid over `base`, with one length: steps said in the upper layer stand in for tokens said below."""
    before, now = base.train, config.train
    if now.steps and now.steps != before.steps and now.tokens == before.tokens:
        now = replace(now, tokens=0)
    elif now.tokens and now.tokens != before.tokens and now.steps == before.steps:
        now = replace(now, steps=0)
    return replace(config, train=now)


def _overlay(base: T, given: T, keys: dict[str, Any]) -> T:
    """`base` with those fields of `given` that the TOML table `keys` names."""
    changes = {}
    for key, value in keys.items():
        new = getattr(given, key)
        changes[key] = _overlay(getattr(base, key), new, value) if is_dataclass(new) else new
    return replace(base, **changes)  # type: ignore[type-var]
