"""`groundup bench …`: benchmarks on one harness, their tables, and comparisons of their results."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import emit, note
from groundup.cli.parse import parse
from groundup.errors import UserError
from groundup.files import write_atomic


@dataclass(frozen=True)
class TableArgs:
    """Tables, a plot or one JSON document from the results of sweeps."""

    results: Annotated[tuple[Path, ...], Positional, arg(metavar="RESULTS...", help_behavior_hint="")]
    """Result files, or directories of cells."""
    where: str = ""
    """Only cells with these parameters, e.g. compile=no,precision=fp32."""
    format: Literal["plain", "markdown", "latex"] = "markdown"
    """How tables are written."""
    plot: str = ""
    """File for the plot (.png, .pdf or .svg); the results of one benchmark only."""
    json: str = ""
    """File for all cells as one JSON document; without a path, standard output holds only that."""


@dataclass(frozen=True)
class DiffArgs:
    """Compare two results: the ratio of every metric, and whether the change is beyond the spread."""

    old: Annotated[Path, Positional, arg(metavar="OLD")]
    """Result file, or directory of cells."""
    new: Annotated[Path, Positional, arg(metavar="NEW")]
    """Result file, or directory of cells."""
    all: bool = False
    """Also show what did not change besides the times."""
    json: str = ""
    """File for the rows as JSON; without a path, standard output holds only that."""


@dataclass(frozen=True)
class CheckArgs:
    """Hold the account's predictions against the results of `bench step`."""

    results: Annotated[tuple[Path, ...], Positional, arg(metavar="RESULTS...", help_behavior_hint="")]
    """Result files, or directories of cells."""
    strict: bool = False
    """Exit code 1 when a line misses its target."""
    hardware: str = ""
    """GPU of the account's table for the predicted time; empty: the one measured on, from its measured peaks."""
    json: str = ""
    """File for the rows as JSON; without a path, standard output holds only that."""


def args_of(word: str) -> type:
    """What `bench` with this word takes."""
    from groundup.bench.benchmark import find

    tools = {"table": TableArgs, "diff": DiffArgs, "check": CheckArgs}
    return tools[word] if word in tools else find(word).options


def main(argv: list[str], prog: str) -> int:
    from groundup.bench.benchmark import find, summaries

    name = prog.split()[-1]
    tools = {"table": _table, "diff": _diff, "check": _check}
    if name in tools:
        return tools[name](parse(args_of(name), argv, prog))
    about = f"{summaries()[name]}.\n\nLists are separated by commas; every combination is one cell."
    return _sweep(find(name), parse(args_of(name), argv, prog, about=about), argv)


def _sweep(benchmark: Any, options: Any, argv: list[str]) -> int:
    from groundup.bench.cells import document
    from groundup.bench.check import missed
    from groundup.bench.plots import check_plot, plot
    from groundup.bench.sweep import directory_of, sweep
    from groundup.bench.tables import check_table, progress_line, table
    from groundup.parallel.processes import this_world

    if options.slurm:
        return _slurm(benchmark, options, argv)
    if options.plot:
        check_plot(benchmark, options.plot)
    cells, left = sweep(benchmark, options, lambda i, n, cell: note(f"[{i}/{n}] {progress_line(benchmark, cell)}"))
    if this_world().rank:
        return 0
    note(f"{len(cells)} cells in {directory_of(benchmark, options)}")
    if left:
        note(f"{left} cells not started before the deadline; run the same command again to go on")
    if not cells:
        raise UserError("no cell was measured before --deadline-seconds; give more time")
    rows = benchmark.check(cells, options) if benchmark.check and options.check else None
    if options.table:
        form = "latex" if options.table.endswith(".tex") else "markdown"
        write_atomic(Path(options.table), table(benchmark, cells, form) + "\n")
    if options.plot:
        plot(benchmark, cells, Path(options.plot))
    text = table(benchmark, cells, "plain") + ("" if rows is None else f"\n\n{check_table(rows)}")
    emit(document(benchmark.name, cells, rows), text, options.json)
    return 1 if rows is not None and options.strict and missed(rows) else 0


def _slurm(benchmark: Any, options: Any, argv: list[str]) -> int:
    from groundup.bench.slurm import slurm_script, without_flag

    # The GPU is where the job will run, not here; the number of cells does not depend on it.
    count = len(benchmark.cells(replace(options, device="cpu")))
    script = slurm_script(
        benchmark.name, without_flag(argv, "--slurm"), count, benchmark.seconds_per_cell, options.device != "cpu"
    )
    write_atomic(Path(options.slurm), script)
    print(options.slurm)
    return 0


def _table(args: TableArgs) -> int:
    from groundup.bench.benchmark import find
    from groundup.bench.cells import document, read_results, select
    from groundup.bench.plots import plot
    from groundup.bench.tables import table

    cells = select(read_results(args.results), args.where)
    names = list(dict.fromkeys(cell["benchmark"] for cell in cells))
    if len(names) > 1 and args.plot:
        raise UserError(f"the results hold {', '.join(names)}; --plot takes those of one benchmark")
    by_name = {name: [cell for cell in cells if cell["benchmark"] == name] for name in names}
    if args.plot:
        plot(find(names[0]), cells, Path(args.plot))
    text = "\n\n".join(table(find(name), some, args.format) for name, some in by_name.items())
    emit(document(", ".join(names), cells), text, args.json)
    return 0


def _diff(args: DiffArgs) -> int:
    from groundup.bench.cells import read_results
    from groundup.bench.diff import diff, diff_table

    rows = diff(read_results([args.old]), read_results([args.new]))
    emit({"rows": rows}, diff_table(rows, args.all), args.json)
    return 0


def _check(args: CheckArgs) -> int:
    from groundup.bench.cells import read_results
    from groundup.bench.check import check_steps, missed
    from groundup.bench.tables import check_table

    cells = [cell for cell in read_results(args.results) if cell["benchmark"] == "step"]
    if not cells:
        raise UserError("the results hold no cell of bench step; predictions exist for that benchmark")
    rows = check_steps(cells, args.hardware)
    emit({"check": rows}, check_table(rows), args.json)
    return 1 if args.strict and missed(rows) else 0
