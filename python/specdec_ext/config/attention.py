"""Checks of attention windows and sink tokens."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .validate import check_int

__all__ = ["check_sinks", "check_window"]

_MOST = 1 << 26


def check_window(field: str, value: Any) -> int | tuple[int, ...] | None:
    """One window, or several in the order of the layers; None: no limit."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return check_int(field, value, ConfigError, low=1, high=_MOST)
    if not value:
        raise ConfigError(f"{field} = []: give one window for all layers, or one per layer")
    return tuple(
        check_int(f"{field}[{layer}]", one, ConfigError, low=1, high=_MOST)
        for layer, one in enumerate(value)
    )


def check_sinks(field: str, value: Any) -> int:
    """Tokens; None is 0."""
    return 0 if value is None else check_int(field, value, ConfigError, low=0, high=_MOST)
