"""Checks of single values, shared by the configurations and the sampling parameters.

Each function returns the value in its plain Python type or raises `error` with the field, the
value, the limit and the remedy. A bool is never an integer here: `max_tokens=True` is a
mistake, not 1.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable

from ..errors import SpecdecError

__all__ = [
    "check_bool",
    "check_choice",
    "check_float",
    "check_int",
    "check_str",
    "check_text",
    "unknown_key",
]

_SHOWN = 80  # characters of a refused value that a message repeats


def show(value: object) -> str:
    """repr(value), shortened: an error message must not carry a megabyte of someone's prompt."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def _range_text(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low}..{high}"
    if low is not None:
        return f">= {low}"
    return f"<= {high}" if high is not None else "any"


def check_int(
    field: str,
    value: object,
    error: type[SpecdecError],
    *,
    low: int | None = None,
    high: int | None = None,
    remedy: str = "",
) -> int:
    """An integer within low..high. Accepts numpy integers, refuses bool and integral floats."""
    hint = f"; {remedy}" if remedy else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise error(
            f"{field} = {show(value)}: expected an integer ({_range_text(low, high)}), "
            f"got {type(value).__name__}{hint}"
        )
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise error(
            f"{field} = {number}: out of range, allowed {_range_text(low, high)}"
            + (hint or f"; choose {field} in that range")
        )
    return number


def check_float(
    field: str,
    value: object,
    error: type[SpecdecError],
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    remedy: str = "",
) -> float:
    """A finite number within low..high (closed) and greater than `above` (open)."""
    allowed = f"> {above}" if above is not None else _range_text(low, high)
    if above is not None and high is not None:
        allowed += f" and <= {high}"
    hint = f"; {remedy}" if remedy else f"; choose {field} in that range"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(
            f"{field} = {show(value)}: expected a number ({allowed}), "
            f"got {type(value).__name__}{hint}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"{field} = {number}: must be finite ({allowed}){hint}")
    if (
        (low is not None and number < low)
        or (high is not None and number > high)
        or (above is not None and number <= above)
    ):
        raise error(f"{field} = {number}: out of range, allowed {allowed}{hint}")
    return number


def check_bool(field: str, value: object, error: type[SpecdecError]) -> bool:
    if not isinstance(value, bool):
        raise error(
            f"{field} = {show(value)}: expected true or false, got {type(value).__name__}; "
            f"write {field}=True or {field}=False"
        )
    return value


def check_str(field: str, value: object, error: type[SpecdecError], *, max_len: int) -> str:
    if not isinstance(value, str):
        raise error(
            f"{field} = {show(value)}: expected a string, got {type(value).__name__}; "
            f"pass {field} as text"
        )
    if len(value) > max_len:
        raise error(f"{field} has {len(value)} characters, limit {max_len}; shorten it")
    return check_text(field, value, error)


def check_text(field: str, text: str, error: type[SpecdecError]) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs are what broken decoding leaves."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as found:
            raise error(
                f"{field} holds half a surrogate pair (U+{ord(text[found.start]):04X}) at "
                f"character {found.start}: it is no text; decode it with errors='replace'"
            ) from None
    return text


def check_choice(
    field: str, value: object, choices: Iterable[str], error: type[SpecdecError]
) -> str:
    """One of `choices`, compared without case."""
    names = list(choices)
    if isinstance(value, str) and value.lower() in names:
        return value.lower()
    near = difflib.get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise error(f"{field} = {show(value)}: expected one of {', '.join(names)}{hint}")


def unknown_key(
    owner: str, key: str, valid: Iterable[str], error: type[SpecdecError]
) -> SpecdecError:
    """The error for a key that `owner` does not have, with the nearest one that it has."""
    names = sorted(valid)
    near = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(names)}"
    return error(f"{owner}: unknown key {show(key)}; {hint}")
