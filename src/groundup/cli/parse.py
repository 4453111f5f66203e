"""Command lines → frozen dataclasses, by tyro; whatever is wrong with one becomes one line.

tyro draws its errors as boxes of several lines. They are caught here and reduced to what went wrong, with the
nearest legal flag where one was misspelt. Only tyro's public functions are used: its structured error events are
private to each of its releases.
"""

import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, fields
from itertools import dropwhile, takewhile
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from groundup.errors import UserError, nearest_name

T = TypeVar("T")

_BOX = re.compile("[│╭╮╰╯┌┐└┘|]")
_RULE = re.compile(r"^[\s─\-]*$")
_REGISTRY = ConstructorRegistry()


def parse(kind: type[T], argv: Sequence[str], prog: str, default: T | None = None, about: str | None = None) -> T:
    """`argv` as an instance of the dataclass `kind`. Raises UserError; `--help` prints and raises SystemExit(0).

    about: what the help says of the command; None: the docstring of `kind`.
    """
    argv = _bare_json(argv)
    drawn = io.StringIO()
    base = tyro.MISSING_NONPROP if default is None else default
    try:
        with redirect_stderr(drawn):
            args = tyro.cli(kind, args=argv, prog=prog, description=about, default=base, registry=_REGISTRY)
    except SystemExit as stop:
        if not stop.code:
            raise
    else:
        if missing := _empty(args):
            raise UserError(f"missing: {missing}; see {prog} --help")
        return args
    raise UserError(f"{_unknown_flag(kind, argv) or _one_line(drawn.getvalue())}; see {prog} --help")


def _empty(args: Any) -> str:
    """Name of a list that needs at least one word and has none: to tyro no words are a list as well."""
    for field in fields(args):
        if getattr(args, field.name) == () and field.default is MISSING and field.default_factory is MISSING:
            hint = get_type_hints(type(args), include_extras=True)[field.name]
            return next(part.metavar for part in hint.__metadata__ if getattr(part, "metavar", None))
    return ""


@_REGISTRY.primitive_rule
def _some_of(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A tuple of some of a few words, as tyro reads one, but an empty default is called "none" in the help."""
    element, *rest = get_args(info.type) or (None,)
    if info.type_origin is not tuple or rest != [Ellipsis] or get_origin(element) is not Literal:
        return None
    legal = get_args(element)
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{{{','.join(legal)}}} ...]",
        instance_from_str=tuple,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: list(value) or ["none"],
        choices=legal,
    )


def flags(kind: type) -> list[str]:
    """Every option and positional that `kind` takes, read off its help (tyro has no other lasting way to ask)."""
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog="groundup")
    names, box = [], ""
    for row in text.getvalue().splitlines():
        row = _BOX.sub(" ", row)
        if re.match(r"[ ─]*(\w+ )?(options|arguments)\b", row):
            box = row
        elif option := re.match(r"  (?:-\w, )?(--\w[\w.-]*(?:, --\w[\w.-]*)*)", row):
            names += option[1].split(", ")
        elif "positional" in box and (positional := re.match(r"  ([A-Z[]\S*)", row)):
            names.append(positional[1])
    return names


def _bare_json(argv: Sequence[str]) -> list[str]:
    """`--json` without a path means standard output, spelled "-"; tyro has no options with an optional value.

    Raises UserError for `--json A B` where A exists: A may be meant as an input, and would be replaced.
    """
    words = []
    for i, word in enumerate(argv):
        words.append(word)
        if word != "--json":
            continue
        path, after = [*argv[i + 1 : i + 3], "-", "-"][:2]
        if (path.startswith("-") and path != "-") or i + 1 == len(argv):
            words.append("-")
        elif not after.startswith("-") and os.path.exists(path):
            raise UserError(f"--json {path}: this file exists; write --json={path} to replace it, or --json last")
    return words


def _unknown_flag(kind: type, argv: Sequence[str]) -> str | None:
    """A sentence about the first flag that does not exist."""
    legal = [name for name in flags(kind) if name.startswith("-")] + ["-h"]
    for word in argv:
        name = word.split("=")[0].replace("_", "-")
        if re.match(r"--?[A-Za-z]", name) and name not in legal:
            near = nearest_name(name, legal)
            return f"unknown flag {name}{near if 'did you mean' in near else ''}"
    return None


def _one_line(drawn: str) -> str:
    """What tyro's box says, without the drawing, the repeated help text and Python's jargon."""
    rows = [_BOX.sub("", row).rstrip() for row in drawn.splitlines()]
    heading = rows[0].strip(" ─") if rows else ""
    body = list(dropwhile(_RULE.match, rows[1:]))
    section = list(takewhile(lambda row: not _RULE.match(row), body))
    if heading.startswith("Required"):
        # `Missing from PROG:`, then each argument indented by four more columns, its help text by eight.
        least = len(section[0]) - len(section[0].lstrip()) + 4
        names = [row.strip() for row in section[1:] if len(row) - len(row.lstrip()) == least]
        return f"missing: {', '.join(names)}"
    text = " ".join(" ".join(section).split()).replace("Error parsing ", "").rstrip(" .")
    text = text.replace("Unrecognized options", "unexpected words")
    text = re.sub(r"Could not parse arguments (.*) into .*", r"\1 are not values of its type", text)
    text = re.sub(r"Expected 1 values", "it takes one", text)
    text = re.sub(r"Expected (\d+) values", r"it takes \1", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", text)
    text = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", text)
    return text[:1].lower() + text[1:]
