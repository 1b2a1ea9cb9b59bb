"""The command's parser: option spelling, refusals, usage errors."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["SpecdecParser", "UsageExit", "normalize_argv", "usage_error"]


# Options of TensorRT-LLM's programs that other commands have, and what to do in place of them.
_FOREIGN = {
    "--checkpoint-dir": "specdec build makes an engine of a checkpoint; name it with --engine_dir",
    "--hf-model-dir": "specdec summarize has it; name the folder of a model with --model",
    "--use-py-session": "there is one runtime; leave it out",
    "--n": "one output per prompt; in Python SamplingParams(n=...) asks for several",
}


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """Option names with '_' spelled '-'; values and everything after '--' stay as they are."""
    result: list[str] = []
    for i, arg in enumerate(argv):
        if arg == "--":
            return result + list(argv[i:])
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            arg = name.replace("_", "-") + equals + value
        result.append(arg)
    return result


class SpecdecParser(argparse.ArgumentParser):
    """argparse without abbreviations; names the nearest option when one is unknown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, getattr(parsed, "command", None))
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the nearest command in place of all of them."""
        choices = action.choices
        if not isinstance(action, argparse._SubParsersAction) or choices is None:
            super()._check_value(action, value)
        elif value not in choices:
            near = difflib.get_close_matches(value, list(choices), n=1)
            hint = f"did you mean {near[0]}?" if near else "specdec --help lists what there is"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {hint}")

    def _refuse(self, unknown: list[str], command: str | None) -> NoReturn:
        owner: argparse.ArgumentParser = self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                owner = action.choices[command]
        options = [name for action in owner._actions for name in action.option_strings]
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if not name.startswith("-"):
            hint = "; quote a text that has blanks"
            if "--input-text" in options:
                hint = "; a prompt is given in quotes, after --input-text"
        hint = "; " + _FOREIGN[name] if name in _FOREIGN else hint
        owner.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def usage_error(args: argparse.Namespace, message: str) -> NoReturn:
    print(f"specdec {args.command}: error: {message}", file=sys.stderr)
    raise UsageExit


class UsageExit(SystemExit):
    """A mistake that only shows after parsing; exit code 2 as argparse's own."""

    def __init__(self) -> None:
        super().__init__(2)
