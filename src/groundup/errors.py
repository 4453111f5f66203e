"""The one error a user's input can cause, and what several messages share."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


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


def optional_package(name: str, use: str) -> Any:
    """The package (or a module in it) that only `use` needs. Raises UserError with what to install."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{use} needs the package {package} (pip install {package})") from error
