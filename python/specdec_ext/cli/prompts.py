"""Prompts of the commands: texts, files, chat messages."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .parser import usage_error

__all__ = ["add_prompt_arguments", "encode_prompt", "read_file", "read_prompts"]


MARK = "\ufeff"  # with which some editors begin a file


def add_prompt_arguments(prompts: argparse._ArgumentGroup) -> None:
    """A file of prompts, and whether they are chat messages."""
    prompts.add_argument(
        "--input-file", metavar="FILE",
        help="one prompt per line; .jsonl: one string or object with prompt, prompt_token_ids or "
        "messages per line; .json: an array of them; - is stdin",
    )  # fmt: skip
    prompts.add_argument(
        "--chat", "--apply-chat-template", action="store_true",
        help="treat each prompt as a user message and apply the chat template",
    )  # fmt: skip
    prompts.add_argument(
        "--chat-template", metavar="NAME|FILE",
        help="vicuna, llama2, chatml or a Jinja file, not the tokenizer's own; implies --chat",
    )  # fmt: skip
    prompts.add_argument("--system-prompt", metavar="TEXT", help="system message; implies --chat")


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """Prompts as text, {"prompt_token_ids"} or {"messages"}."""
    input_text = getattr(args, "input_text", None)
    if input_text is not None and args.input_file is not None:
        usage_error(args, "--input-text and --input-file exclude each other; give one of them")
    if input_text is not None:
        return list(input_text)
    if args.input_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            usage_error(args, "no prompt; give --input-text, --input-file, or text on stdin")
        return [_read_stdin(args).removesuffix("\n")]
    from_stdin = args.input_file == "-"
    text = _read_stdin(args) if from_stdin else read_file(args, "--input-file", args.input_file)
    if args.input_file.endswith(".json"):
        return _json_array(args, text)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        usage_error(args, f"--input-file {args.input_file!r} holds no prompt; one prompt per line")
    if not args.input_file.endswith(".jsonl"):
        return [line for _, line in lines]
    return [
        _prompt_of(args, f"{args.input_file}:{number}", _json(args, f":{number}", line))
        for number, line in lines
    ]


def read_file(args: argparse.Namespace, flag: str, name: str) -> str:
    """The text of the file that a flag names, without a byte order mark. Raises SystemExit(2)."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        usage_error(args, f"{flag} {name!r} cannot be read: {error}")


def _read_stdin(args: argparse.Namespace) -> str:
    try:
        return sys.stdin.read().removeprefix(MARK)
    except UnicodeDecodeError as error:
        usage_error(args, f"stdin cannot be read: {error}")


def _json(args: argparse.Namespace, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        usage_error(args, f"{args.input_file}{place}: not JSON ({error})")


def _json_array(args: argparse.Namespace, text: str) -> list[Any]:
    values = _json(args, "", text)
    if not isinstance(values, list) or not values:
        usage_error(args, f"{args.input_file}: expected a JSON array of prompts; one JSON value "
                    "per line belongs in a .jsonl file, plain text in any other")  # fmt: skip
    return [_prompt_of(args, f"{args.input_file}[{i}]", value) for i, value in enumerate(values)]


def _prompt_of(args: argparse.Namespace, place: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("prompt_token_ids", "messages"):
            if key in value:
                return {key: value[key]}
        if isinstance(value.get("prompt"), str):
            return value["prompt"]
    usage_error(
        args,
        f"{place}: expected a string or an object with prompt, prompt_token_ids or messages",
    )


def encode_prompt(llm: Any, prompt: Any, args: argparse.Namespace) -> tuple[str | None, list[int]]:
    """(text or None, token ids) of a prompt that read_prompts() returned."""
    chat = args.chat or args.chat_template is not None or args.system_prompt is not None
    if isinstance(prompt, dict) and "messages" in prompt:
        messages = prompt["messages"]
    elif chat and isinstance(prompt, str) and not _is_wrapped(llm, prompt, args):
        messages = [{"role": "user", "content": prompt}]
        if args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
    else:
        item: tuple[str | None, list[int]] = llm.prompts.read(prompt)
        return item
    item = llm.prompts.read_chat(messages, args.chat_template, True)
    return item


def _is_wrapped(llm: Any, prompt: str, args: argparse.Namespace) -> bool:
    """The prompt carries the template's markers already; one line on stderr says so."""
    from ..text.chat_template import carries_markers

    if llm.tokenizer is None or not carries_markers(llm.tokenizer, prompt, args.chat_template):
        return False
    if args.system_prompt is not None:
        usage_error(args, "--system-prompt with a prompt that carries the chat template's markers; "
                    "write the system message into the prompt")  # fmt: skip
    print("note: the prompt carries the chat template's markers: not wrapped again",
          file=sys.stderr)  # fmt: skip
    return True
