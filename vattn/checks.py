"""Checks of single values: each returns the value in its plain form, or raises an error of ours."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from vattn.errors import ConfigError, RequestError

Refusal = type[RequestError] | type[ConfigError]

_LONGEST_SHOWN = 100


def shown(value: object) -> str:
    """A short `repr(value)` for an error message. It works for every object."""
    try:
        text = repr(value)
    except Exception:  # `repr` fails for an int of 5,000 digits, and may fail for a user's object
        return f"a value of type {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({type(value).__name__})"


def whole(
    name: str,
    value: Any,
    low: int,
    high: int | None = None,
    *,
    hint: str = "",
    error: Refusal = RequestError,
) -> int:
    """`value` as an int in [low, high]. Booleans, floats and arrays are refused."""
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be {wanted}{hint}, got {shown(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise error(f"{name} must be {wanted}{hint}, got {shown(number)}")
    return number


def number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    above: bool = False,
    error: Refusal = RequestError,
) -> float:
    """`value` as a float in [low, high], or with `above` in (low, high]. Refuses NaN and infinities."""
    if low == -math.inf:
        wanted = "a finite number"
    elif high == math.inf:
        wanted = f"a finite number above {low:g}" if above else f"a finite number of at least {low:g}"
    else:
        wanted = f"in {'(' if above else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be {wanted}, got {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        raise error(f"{name} must be {wanted}, got a number too large for a float") from None
    if not math.isfinite(found) or not low <= found <= high or (above and found == low):
        raise error(f"{name} must be {wanted}, got {found:g}")
    return found


def flag(name: str, value: Any, *, optional: bool = False, error: Refusal = RequestError) -> None:
    """Refuse anything but True and False. With `optional`, None is allowed too."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise error(
            f"{name} must be True{', False or None' if optional else ' or False'}, got {shown(value)}"
        )


def choice(name: str, value: Any, allowed: Sequence[str], *, error: Refusal = ConfigError) -> None:
    """Refuse anything but one of the strings in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise error(f"{name}={shown(value)} is unknown: use one of {', '.join(map(repr, allowed))}")


def text(name: str, value: Any, *, error: Refusal = RequestError) -> str:
    """`value` if it is a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise error(f"{name} must be text, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as bad:
            raise error(
                f"{name} has {value[bad.start]!a} at character {bad.start:,}: that is half a surrogate pair "
                "or a byte that was not UTF-8, and no text"
            ) from None
    return value


def texts(name: str, values: Any) -> tuple[str, ...]:
    """A tuple of non-empty strings. None gives an empty tuple."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of strings, got {shown(values)}")
    strings = []
    for index, value in enumerate(_items(name, values)):
        if not isinstance(value, str):
            raise RequestError(f"{name} must hold strings, got {shown(value)}")
        if not value:
            raise RequestError(f"{name} must not hold an empty string")
        strings.append(text(f"{name}[{index}]", value))
    return tuple(strings)


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """A tuple of token ids, checked as far as possible without a model. None gives an empty tuple."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of token ids, got {shown(values)}")
    return tuple(whole(f"a token id in {name}", value, 0) for value in _items(name, values))


def each(name: str, value: Any, count: int) -> list[Any]:
    """One value for each of `count` prompts: `value` for all, or a sequence with one for each."""
    if is_array(value):
        value = _items(name, value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return [value] * count
    if length(value) != count:
        raise RequestError(f"{count} prompts came with {length(value)} values of {name}")
    return list(value)


def length(values: Sequence[Any]) -> int:
    """Number of values. For a range that is too long for `len`, the largest number `len` can return."""
    try:
        return len(values)
    except OverflowError:
        return sys.maxsize


def is_array(value: Any) -> bool:
    """True for an array or a tensor with at least one dimension."""
    dimensions = getattr(value, "ndim", 0)
    return isinstance(dimensions, int) and dimensions > 0


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for an error message with the known name closest to `name`, or "" if none is close."""
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _items(name: str, values: Iterable[Any]) -> list[Any]:
    """The items of an iterable. Items of arrays become Python numbers."""
    try:
        found = values.tolist() if hasattr(values, "tolist") else list(values)
    except Exception as why:
        raise RequestError(f"{name} can't be read as a list: {why}") from why
    return found if isinstance(found, list) else [found]
