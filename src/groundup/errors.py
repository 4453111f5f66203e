"""The one error a user's input can cause, and the nearest-name hint that several messages share."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Input that cannot be used. The message is one line: what, where, what to do.

    The command line prints it on standard error and exits with code 2.
    """


def nearest_name(name: str, legal: Iterable[str]) -> str:
    """`' (did you mean "x"?)'` for the legal name closest to `name`, else the sorted list of legal names."""
    names = sorted(legal)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f' (did you mean "{close[0]}"?)'
    return f" (legal: {', '.join(names)})"
