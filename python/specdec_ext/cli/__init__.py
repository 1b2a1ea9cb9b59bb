"""The `specdec` command: generate, chat, serve, bench, tune, inspect, tree, env, trainers, ...

Data goes to stdout, logs and progress to stderr. Exit codes: 0 done, 1 failure at run time (a
request failed, --verify found a difference), 2 wrong usage or an invalid request, 3 unsupported
model, parameter or hardware, 4 invalid checkpoint or configuration, 130 interrupted (partial output
is kept). Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from ..errors import SpecdecError
from ..extras import named_extras
from ..log import LEVELS, logger, setup_logging
from .common import SpecdecParser, normalize_argv

__all__ = ["main"]

EXIT_INTERRUPTED = 130

# Command -> (module, one line of help). A module has add_arguments(parser) and run(args) -> int.
_COMMANDS = {
    "generate": ("generate", "decode prompts, with or without speculation"),
    "run": ("generate", "the same as generate"),
    "chat": ("chat", "talk with a model or with a server"),
    "serve": ("serve", "serve a model over HTTP, as OpenAI's interface"),
    "bench": ("bench", "measure latency, throughput, or a sweep over batch and draft sizes"),
    "tune": ("tune", "find the lookahead or prompt lookup configuration that pays most"),
    "inspect": ("inspect", "show a model, its memory plan and the code that runs it"),
    "convert": ("convert", "write any checkpoint as one folder of safetensors shards"),
    "build": ("build", "make an engine folder of a converted checkpoint: limits, step times"),
    "summarize": ("summarize", "summarize articles: ROUGE, speed and equal tokens, ours and HF's"),
    "report": ("report", "one page of plots from the JSON files of the other commands"),
    "trace": ("trace", "decode one prompt and show what every step drafted and accepted"),
    "tree": ("tree", "show or tune a Medusa tree"),
    "convert-heads": ("convert_heads", "convert Medusa heads between projects' files"),
    "env": ("env", "show versions and hardware for a bug report"),
    "train-medusa": ("train", "train Medusa heads for a model on its own texts"),
    "train-redrafter": ("train", "train a ReDrafter for a model on its own texts"),
    "train-drafter": ("train", "train a small draft model for a model on its own texts"),
    "train-eagle3": ("train", "train an EAGLE-3 head for a model on its own texts"),
}


_EXAMPLES = """\
examples:
  specdec chat "Write a haiku about rivers." --stats
  specdec generate --input-text "Once upon a time" --stats
  specdec generate --chat --input-file prompts.txt --medusa --verify

In option names '-' and '_' are equivalent. 'specdec COMMAND --help' lists the
options of a command."""


class _Version(argparse.Action):
    """--version without reading package metadata on every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .._version import __version__

        print(f"specdec {__version__}")
        parser.exit(0)


def _short_usage(parser: argparse.ArgumentParser) -> str:
    """What has to be given. All options would fill a screen in front of every error."""
    words = []
    for action in parser._actions:
        name = str(action.metavar or action.dest)
        if not action.option_strings:
            words.append(f"[{name}]" if action.nargs == "?" else name)
        elif action.required:
            words.append(f"{action.option_strings[0]} {name}")
    return " ".join([parser.prog, *words, "[options]"])


def _make_parser() -> SpecdecParser:
    parser = SpecdecParser(
        prog="specdec",
        description="Speculative decoding: the same output in fewer forward passes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, help_line) in _COMMANDS.items():
        description = help_line[0].upper() + help_line[1:] + "."
        sub = commands.add_parser(name, help=help_line, description=description)
        importlib.import_module(f".{module}", __name__).add_arguments(sub)
        sub.add_argument(
            "--log-level",
            type=str.lower,
            choices=tuple(LEVELS),
            help="log messages to stderr from this level on; verbose is debug (default: "
            "$SPECDEC_LOG_LEVEL or warning)",
        )
        sub.usage = _short_usage(sub)
        sub.set_defaults(run_command=module)
    return parser


def _stop_writing() -> None:
    """After a broken pipe: keep the interpreter's own flush at exit from failing again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _make_parser()
    try:
        args = parser.parse_args(normalize_argv(sys.argv[1:] if argv is None else argv))
        if args.command is None:
            parser.error('give a COMMAND, for example specdec chat "a question"; specdec --help '
                         "lists them")  # fmt: skip
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    setup_logging(args.log_level)
    try:
        with named_extras(f"specdec {args.command}"):
            code: int = importlib.import_module(f".{args.run_command}", __name__).run(args)
        sys.stdout.flush()
        return code
    except SpecdecError as error:
        print(f"specdec {args.command}: error: {error}", file=sys.stderr)
        logger.debug("traceback", exc_info=error)
        return error.exit_code
    except SystemExit as done:  # UsageExit
        return done.code if isinstance(done.code, int) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _stop_writing()
        return 1
    except Exception as error:
        print(
            f"specdec {args.command}: internal error: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        if logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        else:
            print("(--log-level debug shows the traceback)", file=sys.stderr)
        return 1
