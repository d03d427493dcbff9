"""TOML as typed records: reading, with errors that name file and key, and writing. Only `read_toml` does I/O."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigError
from ..plain_text import unicode_text

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

T = TypeVar("T", bound=msgspec.Struct)

_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL)  # of msgspec.ValidationError
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def read_toml(file: Path, option: str) -> dict[str, Any]:
    """Read a TOML file as a plain dictionary. Blocks. ConfigError, which names the option that named it: it cannot be
    read, or is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(option, str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not a path, UTF-8 or TOML, or too deeply nested brackets
        raise ConfigError(option, str(file), f"it is not valid TOML: {error}") from error


def typed(values: Mapping[str, Any], kind: type[T], source: str) -> T:
    """Convert `values`, as `read_toml` returns them, to a record of type `kind`, which should forbid unknown fields.
    ConfigError: a key is missing, unknown, or has a value of another type or range; its `option` is "source: key", such
    as "hw.toml: drive.writes[2].depth"."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _error_of(str(error), values, kind, source) from None


def _error_of(complaint: str, values: Any, kind: type[msgspec.Struct], source: str) -> ConfigError:
    match = _COMPLAINT.fullmatch(complaint)
    what, where = (match["what"], match["where"] or "") if match else (complaint, "")
    steps = [int(index) if index else name for name, index in _STEP.findall(where)]
    if unknown := _UNKNOWN.fullmatch(what):
        allowed = f"there is no such key; there are {', '.join(_keys_at(kind, steps))}"
        steps.append(unknown[1])
        where = f"{where}.{unknown[1]}" if where else unknown[1]
    else:
        allowed = what[0].lower() + what[1:]
    given = functools.reduce(lambda found, step: found[step], steps, values)
    return ConfigError(f"{source}: {where}" if where else source, given, allowed)


def _keys_at(kind: object, steps: list[str | int]) -> tuple[str, ...]:
    info: Any = msgspec.inspect.type_info(kind)
    for step in steps:
        if isinstance(step, str):
            info = next(field.type for field in info.fields if field.encode_name == step)
        else:
            info = info.item_type
        if isinstance(info, msgspec.inspect.UnionType):
            info = next(each for each in info.types if isinstance(each, msgspec.inspect.StructType))
    return tuple(field.encode_name for field in info.fields)


def toml_text(values: Mapping[str, Any], above: str = "") -> str:
    """Write a document, or the table named `above`: plain values first, then tables and arrays of tables."""
    plain, tables = [], []
    for name, value in values.items():
        key = name if _BARE_KEY.fullmatch(name) else toml_value(name)
        path = f"{above}.{key}" if above else key
        if isinstance(value, Mapping):
            tables.append(f"\n[{path}]\n{toml_text(value, path)}")
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, Mapping) for each in value):
            tables += [f"\n[[{path}]]\n{toml_text(each, path)}" for each in value]
        else:
            plain.append(f"{key} = {toml_value(value)}\n")
    return "".join(plain + tables)


def toml_value(value: object) -> str:
    """Write a string, number, boolean, or an array of them as TOML. Raises TypeError: it is none of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # TOML knows all escapes of JSON, and wants DEL escaped too. Neither allows surrogates.
        return json.dumps(unicode_text(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"no value of TOML: {type(value).__name__}")
