"""Every command and flag, frozen: surface.txt changes only on purpose.

After a deliberate change: `python tests/cli/test_cli_surface.py` rewrites it.
"""

from importlib import import_module
from pathlib import Path

from groundup.cli import COMMANDS
from groundup.cli.parse import flags

GOLDEN = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """One line a command or flag, in the order of the help; `TableArgs` in a module is its word `table`."""
    lines = []
    for command, (module, _) in COMMANDS.items():
        for name, kind in vars(import_module(module)).items():
            if not name.endswith("Args"):
                continue
            words = f"{command} {name.removesuffix('Args').lower()}".strip()
            lines += [words, *(f"{words} {flag}" for flag in flags(kind))]
    return "\n".join(lines) + "\n"


def test_the_commands_and_flags_are_those_of_the_golden_file():
    assert surface() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(surface())
