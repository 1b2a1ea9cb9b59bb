"""Flags that hold the output to a form: JSON, an expression, texts to choose from, a grammar."""

from __future__ import annotations

import argparse
from typing import Any

from .prompts import read_file

__all__ = ["add_form_arguments", "structured_outputs"]


def add_form_arguments(parser: Any) -> None:
    """The flags, of which one may be given."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", metavar="FILE", help="the output is JSON of the schema in this file"
    )
    form.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    form.add_argument("--regex", metavar="EXPR", help="the output matches this expression")
    form.add_argument(
        "--choice", nargs="+", metavar="TEXT", help="the output is one of these texts"
    )
    form.add_argument(
        "--grammar", metavar="FILE", help="the output obeys the Lark or GBNF grammar in this file"
    )


def structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the flags ask for, as SamplingParams takes it."""
    if args.json_schema is not None:
        return {"json": read_file(args, "--json-schema", args.json_schema)}
    if args.grammar is not None:
        return {"grammar": read_file(args, "--grammar", args.grammar)}
    if args.json_object:
        return {"json_object": True}
    for kind in ("regex", "choice"):
        if getattr(args, kind) is not None:
            return {kind: getattr(args, kind)}
    return None
