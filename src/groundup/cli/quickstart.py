"""`groundup quickstart`: the whole path in one command."""

from groundup.cli import INTERRUPTED
from groundup.cli.parse import parse
from groundup.quickstart import Quickstart as Args
from groundup.quickstart import quickstart


def main(argv: list[str], prog: str) -> int:
    return 0 if quickstart(parse(Args, argv, prog)) else INTERRUPTED
