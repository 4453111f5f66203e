"""What a benchmark is: a file in suites/ that defines one `BENCHMARK`.

It says which cells its options ask for and how one cell is measured; the sweep, the processes, the JSON, the tables
and the plots are the same for all. The file's name is the command (`mixed_precision.py` is `bench mixed-precision`),
the first line of its docstring the help.
"""

import ast
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

from groundup.bench import suites
from groundup.bench.cells import Cell, Parameters
from groundup.config import ModelConfig, RunConfig, load_toml, size
from groundup.config.model import HOW
from groundup.errors import UserError, nearest_name


@dataclass(frozen=True)
class SweepOptions:
    """What every benchmark takes; the help describes a benchmark in the first line of its file."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; auto: cuda where there is one."""
    seed: int = 0
    """Seeds weights and inputs."""
    out: str = ""
    """Directory of the cells, a JSON file each; empty: runs/bench/NAME. Cells already there are not measured again."""
    fresh: bool = False
    """Measure again what the directory already holds."""
    time_limit: float = 600.0
    """Seconds a cell may take, compilation included; its process is then stopped and the sweep goes on."""
    deadline_seconds: float = 0.0
    """Seconds after which no further cell starts; 0: none."""
    json: str = ""
    """File for the cells as one JSON document; without a path, standard output holds only that."""
    table: str = ""
    """File for the table: Markdown for .md, LaTeX for .tex."""
    plot: str = ""
    """File for the plot (.png, .pdf or .svg)."""
    slurm: str = ""
    """Write a Slurm script that runs this very sweep, and measure nothing."""


@dataclass(frozen=True)
class Measurement:
    """What `run` returns for one cell."""

    metrics: Mapping[str, Any]
    """Flat names → a number, a string, None (not measured: `notes` says why) or a summary of harness.summary."""
    stamp: Mapping[str, Any] = field(default_factory=dict)
    """What the environment's stamp cannot know by itself: dtype, method, clocks; grad_mode where it is not "grad", step
    where it is not "steady"."""
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    module: str
    """`__name__` of the file that defines it: the worker process imports it by this name."""
    options: type[SweepOptions]
    cells: Callable[[Any], list[Parameters]]
    """Options → the parameters of every cell, most important first. Raises UserError for impossible options."""
    run: Callable[[Parameters, Any], Measurement]
    """Measures one cell on a torch.device, in a worker process, where TF32 is off."""
    columns: Mapping[str, str]
    """Of the table: heading → metric, whose first word says how it is written."""
    hidden: tuple[str, ...] = ()
    """Parameters that the table leaves out even where they vary."""
    plot_x: str = ""
    """Parameter on the plot's horizontal axis."""
    plot_y: str = ""
    """Metric on its vertical axis."""
    check: Callable[[list[Cell], Any], list[dict[str, Any]]] | None = None
    """Cells and options → rows of prediction beside measurement, for benchmarks that have predictions."""
    group: Callable[[Parameters], object] = lambda parameters: "all"
    """Cells of equal groups share one worker process."""
    seconds_per_cell: float = 30.0
    """A generous guess, for the time limit of a Slurm script."""

    @property
    def name(self) -> str:
        return self.module.rsplit(".", 1)[-1].replace("_", "-")


def find(name: str) -> Benchmark:
    """The benchmark called `name`. Raises UserError with the nearest name."""
    names = list(summaries())
    if name not in names:
        raise UserError(f'no benchmark "{name}"{nearest_name(name, names)}')
    return import_module(f"{suites.__name__}.{name.replace('-', '_')}").BENCHMARK


def summaries() -> dict[str, str]:
    """Every benchmark's name and the first line of its docstring, read without importing it (or torch)."""
    found = {}
    for module in pkgutil.iter_modules(suites.__path__):
        spec = find_spec(f"{suites.__name__}.{module.name}")
        assert spec is not None
        assert spec.origin is not None
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        found[module.name.replace("_", "-")] = text.split("\n")[0].rstrip(".")
    return found


def grid(last: Parameters, **axes: Iterable[Any]) -> list[Parameters]:
    """Every combination of the axes' values, the first axis outermost; `last` is at each one's end."""
    return [dict(zip(axes, values, strict=True)) | last for values in product(*axes.values())]


def without_repeats(cells: Iterable[Parameters]) -> list[Parameters]:
    """Each cell once, where it came first: for an axis that means nothing beside some values of another one."""
    return list({json.dumps(cell): cell for cell in cells}.values())


def words(text: str, flag: str, legal: tuple[str, ...]) -> list[str]:
    """A comma-separated list of legal words, e.g. "fp32,bf16". Raises UserError naming the flag."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in legal:
            raise UserError(f'{flag}: no "{word}"{nearest_name(word, legal)}')
    return _filled(found, flag)


def yes_no(text: str, flag: str) -> list[bool]:
    """A comma-separated list of yes and no. Raises UserError naming the flag."""
    return [word == "yes" for word in words(text, flag, ("yes", "no"))]


def numbers(text: str, flag: str, least: int = 1) -> list[int]:
    """A comma-separated list of whole numbers of at least `least`. Raises UserError naming the flag."""
    found = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        if not word.isdecimal() or int(word) < least:
            raise UserError(f'{flag}: "{word}" is not a whole number of at least {least}')
        found.append(int(word))
    return _filled(found, flag)


def shapes(sizes: str, config: str) -> dict[str, ModelConfig]:
    """Name → shape: of named sizes, separated by commas, or of the [model] of a run's TOML file where one is given."""
    if config:
        return {Path(config).stem: load_toml(Path(config), RunConfig).model.resolve()}
    return {name: size(name).resolve() for name in (word.strip() for word in sizes.split(",")) if name}


SHAPE = tuple(field.name for field in fields(ModelConfig) if field.name not in (*HOW, "context_length"))
"""Fields of a model's shape, as parameters of a cell."""


def shape_fields(config: ModelConfig) -> Parameters:
    """The shape of `config` as parameters, but for its context length."""
    return {name: getattr(config, name) for name in SHAPE}


def config_of(parameters: Parameters) -> ModelConfig:
    """The model that a cell measures. Cells from before there was a choice were measured on the plain path."""
    known = {field.name for field in fields(ModelConfig)}
    plain: Parameters = {"attention": "reference", "kernels": "reference"}
    return ModelConfig(**plain | {name: parameters[name] for name in parameters if name in known}).resolve()


def at_least(value: float, flag: str, least: float) -> None:
    """Raises UserError when `value` is below `least`, or no number."""
    if not least <= value < float("inf"):
        raise UserError(f"{flag} is {value}; it must be a number of at least {least}")


def _filled(found: list, flag: str) -> list:
    if not found:
        raise UserError(f"{flag}: the list is empty; give at least one value")
    return list(dict.fromkeys(found))
