"""Every command and flag, frozen: surface.txt changes only on purpose.

After a deliberate change: `python tests/cli/test_cli_surface.py` rewrites it.
"""

from importlib import import_module
from pathlib import Path

from groundup.cli import COMMANDS, commands
from groundup.cli.parse import flags

GOLDEN = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """One line a command or flag, in the order of the help, the benchmarks last."""
    lines = []
    for command, (name, _) in (COMMANDS | commands("bench")).items():
        module, second = import_module(name), command.split()[-1]
        kind = module.args_of(second) if hasattr(module, "args_of") else module.Args
        lines += [command, *(f"{command} {flag}" for flag in flags(kind))]
    return "\n".join(lines) + "\n"


def test_the_commands_and_flags_are_those_of_the_golden_file():
    assert surface() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(surface())
