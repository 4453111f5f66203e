"""Configurations as TOML files; an unknown key is an error with the nearest legal name."""

import tomllib
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

from groundup.errors import UserError, nearest_name

T = TypeVar("T")


def load_toml(path: Path, kind: type[T]) -> T:
    """Read a file into the frozen dataclass `kind`; keys left out keep their defaults. Raises UserError."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such configuration file: {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}") from None
    return _build(kind, table, str(path), "")


def dump_toml(config: Any) -> str:
    """The whole configuration, defaults included, as TOML text that `load_toml` reads back to an equal one."""
    return tomli_w.dumps(asdict(config))


def _build(kind: type[T], table: dict[str, Any], path: str, prefix: str) -> T:
    hints = get_type_hints(kind)
    legal = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in legal:
            raise UserError(f'{path}: unknown key "{prefix}{key}"{nearest_name(key, legal)}')
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{path}: {prefix}{key} is a table ([{prefix}{key}]), not {value!r}")
            values[key] = _build(hint, value, path, f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            values[key] = _convert(value, hint, f"{path}: {prefix}{key}")
    missing = [n for n, f in legal.items() if n not in values and f.default is f.default_factory is MISSING]
    if missing:
        raise UserError(f'{path}: key "{prefix}{missing[0]}" is missing')
    return kind(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the field's type; an int is a legal float, a list a legal tuple. Raises UserError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, list):
        element = arguments[0]
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise UserError(f"{where} needs {len(arguments)} values, not {len(value)}")
        return tuple(_convert(v, element, where) for v in value)
    if str(origin) == "typing.Literal":
        if value in arguments:
            return value
        raise UserError(f"{where} is {value!r}; legal: {', '.join(map(repr, arguments))}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise UserError(f"{where} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}")
