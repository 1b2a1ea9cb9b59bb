"""Options of TensorRT-LLM's programs that mean nothing here: accepted, with one line that says so;
values that contradict what this package does are errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from ..errors import UnsupportedConfigError

__all__ = ["ForeignFlags", "add_foreign_arguments", "note_foreign", "stage_line"]

# Option -> (what stands for its value, None: it has none; values that are refused, with the remedy;
# why it means nothing).
ForeignFlags = Mapping[str, tuple[str | None, Mapping[str, str], str]]


def add_foreign_arguments(parser: argparse.ArgumentParser, flags: ForeignFlags) -> None:
    """Options that are read and have no effect."""
    group = parser.add_argument_group("accepted from TensorRT-LLM's command lines, without effect")
    for name, (value, _, why) in flags.items():
        if value is None:
            group.add_argument(name, action="store_true", help=why)
        else:
            # A flag that newer versions give without a value.
            group.add_argument(name, nargs="?", const="enable", metavar=value, help=why)


def note_foreign(args: argparse.Namespace, flags: ForeignFlags) -> None:
    """One line on stderr for those that were given. Raises UnsupportedConfigError."""
    given = []
    for name, (_, refused, why) in flags.items():
        value = getattr(args, name.lstrip("-").replace("-", "_"))
        if value in (None, False):
            continue
        if value in refused:
            raise UnsupportedConfigError(f"{name}={value}: {refused[value]}")
        given.append(f"{name} ({why})")
    if given:
        stage_line(args)(f"without effect here: {', '.join(given)}")


def stage_line(args: argparse.Namespace) -> Callable[[str], object]:
    """What tells a line on stderr of what is done; --log_level=error silences it."""
    if args.log_level in ("error", "internal_error"):
        return lambda line: None
    return lambda line: print(line, file=sys.stderr)
