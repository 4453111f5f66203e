"""Packages that only some inputs or outputs need."""

from importlib import import_module
from typing import Any

from groundup.errors import UserError


def optional_package(name: str, use: str) -> Any:
    """The package, or a UserError that says what needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{use} needs the package {name} (pip install {name})") from error
