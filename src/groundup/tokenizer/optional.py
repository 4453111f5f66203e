"""Packages that only some inputs or outputs need."""

from importlib import import_module
from typing import Any

from groundup.errors import UserError


def optional_package(name: str, use: str) -> Any:
    """The package (or a module in it), or a UserError that says what needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{use} needs the package {package} (pip install {package})") from error
