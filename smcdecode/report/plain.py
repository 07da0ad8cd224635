"""Dataclasses ↔ JSON. Knows types, not what they mean.

Every float survives exactly: finite ones by their shortest repr, the others as the strings "inf", "-inf" and "nan",
because JSON proper has no numbers for them. Bytes become characters of the same code points, integer keys strings.
"""

import dataclasses
import math
import types
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["dump", "read"]


def dump(value: Any) -> Any:
    """What ``json.dumps`` takes, of dataclasses, dicts keyed by strings or integers, sequences and plain values."""
    if dataclasses.is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): dump(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(part) for part in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read(kind: Any, value: Any) -> Any:
    """The value of type ``kind`` that :func:`dump` made ``value`` of.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it was made of something else.
    """
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: read(hints[name], part) for name, part in value.items()})  # type: ignore[operator]
    parts = get_args(kind)
    if (sequence := get_origin(kind)) in (list, tuple):  # of one type, of any length
        return sequence(read(parts[0], part) for part in value)
    if get_origin(kind) is dict:
        return {parts[0](key): read(parts[1], part) for key, part in value.items()}
    if isinstance(kind, types.UnionType):  # X | None, or X | Y
        some = tuple(part for part in parts if part is not types.NoneType)
        return None if value is None and some != parts else _first_that_fits(some, value)
    return _scalar(kind, value)


def _first_that_fits(kinds: tuple[Any, ...], value: Any) -> Any:
    """The value as the first of several types that it can be read as."""
    for kind in kinds[:-1]:
        try:
            return read(kind, value)
        except (TypeError, ValueError):
            continue
    return read(kinds[-1], value)


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind is bytes:
        return value.encode("latin-1")
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
