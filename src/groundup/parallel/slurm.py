"""Slurm's way to write many host names: `node[01-03,7],login` → node01, node02, node03, node7, login."""

import re

from groundup.errors import UserError


def hosts(text: str) -> list[str]:
    """Every host of a node list, in order. A name may hold several brackets: `rack[1-2]n[0-1]`.

    Raises UserError for an empty or unreadable list.
    """
    found = [host for part in _split(text) for host in _expand(part)]
    if not found or not all(re.fullmatch(r"[\w.\-]+", host) for host in found):
        raise UserError(f"SLURM_NODELIST is {text!r}: no list of hosts; export MASTER_ADDR")
    return found


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    numbers: list[str] = []
    for piece in match[1].split(","):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return []
        # Leading zeros are part of the name.
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last if dash else first) + 1)]
    return [part[: match.start()] + number + rest for number in numbers for rest in _expand(part[match.end() :])]
