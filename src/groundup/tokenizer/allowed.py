"""Which special tokens a text may contain: tiktoken's distinction of allowed and disallowed ones.

Text from outside may hold the spelling of a special token by chance or by intent. A special token that is

- allowed becomes its id;
- disallowed is an error: the text is refused;
- neither is ordinary text.

Here everything is allowed unless the caller says otherwise; tiktoken disallows everything by default.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from groundup.errors import UserError, nearest_name

Names = Literal["all"] | Collection[str]


def allowed_names(specials: Mapping[str, int], allowed: Names, disallowed: Names, text: str | bytes) -> set[str]:
    """The names that are to become ids. Raises UserError where the text holds a disallowed one."""
    names = set(specials) if allowed == "all" else _names(allowed, "allowed_special")
    if unknown := sorted(names - set(specials)):
        raise UserError(f"allowed_special: {unknown[0]!r} is no special token{nearest_name(unknown[0], specials)}")
    refused = set(specials) - names if disallowed == "all" else _names(disallowed, "disallowed_special")
    for name in sorted(refused):
        at = text.find(name) if isinstance(text, str) else text.find(name.encode())
        if at >= 0:
            unit = "character" if isinstance(text, str) else "byte"
            raise UserError(
                f"the text holds the disallowed special token {name!r} at {unit} {at}: "
                "allow it (allowed_special) or take it as plain text (disallowed_special=())"
            )
    return names


def _names(given: Collection[str], argument: str) -> set[str]:
    if isinstance(given, str):
        raise UserError(f'{argument} is the text {given!r}: give "all" or a set of names')
    if "" in given:
        raise UserError(f"{argument} holds an empty name: leave it out")
    return set(given)


def split_at(text: str | bytes, names: Collection[str]) -> Iterator[tuple[str | bytes, str | None]]:
    """The text in order as (ordinary text, None) and ("", name): leftmost first, of several the longest."""
    ordered = sorted(names, key=len, reverse=True)
    if not ordered:
        yield text, None
        return
    if isinstance(text, str):
        parts = re.split("(" + "|".join(map(re.escape, ordered)) + ")", text)
    else:
        parts = re.split(b"(" + b"|".join(re.escape(name.encode()) for name in ordered) + b")", text)
    for number, part in enumerate(parts):
        if number % 2:
            yield part[:0], part if isinstance(part, str) else part.decode()
        elif part:
            yield part, None
