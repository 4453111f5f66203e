"""Frozen dataclasses of every room, free of torch. A field's docstring is its help text on the command line.

0 in a field that says so means "derived": TOML has no null, and a field left at 0 stays derived when another
one is overridden later. `resolve()` fills every derived field and checks the whole, once.
"""

from groundup.config.model import ModelConfig
from groundup.config.optim import OptimConfig
from groundup.config.parallel import ParallelConfig
from groundup.config.run import DataConfig, RunConfig, TrainConfig
from groundup.config.sizes import SIZES, size
from groundup.config.toml import dump_toml, load_toml

__all__ = [
    "SIZES",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "dump_toml",
    "load_toml",
    "size",
]
