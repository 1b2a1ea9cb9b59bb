"""Calls of functions in a model's own words: what its chat template says of them, a grammar of such
answers, and a reader that takes them apart.

Known is one format, that of Qwen, Hermes and those who learned from them: any text, then
<tool_call>{"name": ..., "arguments": {...}}</tool_call>, once or several times. Whether a template
has it is not looked up by name: a conversation with calls is rendered and read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecdecError
from ..text.prompts import PromptReader

__all__ = ["CLOSING", "OPENING", "CallReader", "ToolFormat", "format_of", "writes_calls"]

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_WORD = "specdecprobe"
_CALLS: list[dict[str, Any]] = [
    {"name": f"{_WORD}{i}", "arguments": {"a": i, "b": [f"{_WORD}given{i}"]}} for i in range(2)
]
_FUNCTIONS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"{_WORD}{i}",
            "description": f"{_WORD} says{i}",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for i in range(2)
]
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": f"{_WORD} asks"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"{_WORD}{i}", "type": "function", "function": call}
            for i, call in enumerate(_CALLS)
        ],
    },
    {"role": "tool", "tool_call_id": f"{_WORD}0", "content": f"{_WORD} answers"},
]


@dataclass(frozen=True)
class ToolFormat:
    """How a template writes calls.

    before, after  whitespace between the marks and the call's JSON
    between        whitespace between two calls
    are_tokens     the marks are tokens of the vocabulary, not spelled
    """

    before: str
    after: str
    between: str
    are_tokens: bool

    def grammar(self, schema: Mapping[str, Any], *, several: bool) -> str:
        """A Lark grammar of answers: text in which no call begins; or text and a call, or several.

        schema  of one call, {"name": ..., "arguments": ...}
        """
        # The grammar's names of tokens are the tokens' own texts, without quotes.
        begin, end = (OPENING, CLOSING) if self.are_tokens else map(json.dumps, (OPENING, CLOSING))
        silent = f"& ~/(?s:.*){OPENING}(?s:.*)/"
        opening = (
            f"opening: BEFORE? {begin}\nBEFORE: /(?s:.+)/ {silent}"
            if self.are_tokens
            else f"opening[lazy]: /(?s:.*){OPENING}/"
        )
        more = f"({_literal(self.between)} {begin} call)*" if several else ""
        # JSON as templates write it, which is also what forms have (text/grammar.py).
        written = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        body = json.dumps({"x-guidance": written, **schema})
        return (
            f"start: TEXT | opening call {more}\n"
            f"TEXT: /(?s:.*)/ {silent}\n"
            f"{opening}\n"
            f"call: {_literal(self.before)} body {_literal(self.after)} {end}\n"
            f"body: %json {body}\n"
        )


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def format_of(reader: PromptReader, tokenizer: Any) -> ToolFormat | None:
    """The format in which the model's template lists functions and writes calls; None: another, or
    none that can be read."""
    try:
        text, _ = reader.read_chat(_TURNS, tools=_FUNCTIONS)
        marks = [tokenizer(mark, add_special_tokens=False)["input_ids"]
                 for mark in (OPENING, CLOSING)]  # fmt: skip
    except (SpecdecError, TypeError):  # the template refuses such turns, or there is no tokenizer
        return None
    listed, found, said = (text or "").partition(_TURNS[0]["content"])
    if not found or not all(
        function["function"]["description"] in listed for function in _FUNCTIONS
    ):
        return None
    first, second = (re.escape(json.dumps(call)) for call in _CALLS)
    match = re.search(
        rf"{OPENING}(\s*){first}(\s*){CLOSING}(\s*){OPENING}\1{second}\2{CLOSING}", said
    )
    if match is None:
        return None
    lengths = {len(ids) == 1 for ids in marks}
    if len(lengths) != 1:  # one of them is a token, the other is spelled
        return None
    before, after, between = match.groups()
    return ToolFormat(before, after, between, are_tokens=lengths.pop())


def writes_calls(reader: PromptReader) -> bool:
    """The model's template writes calls of earlier answers, in whatever form."""
    try:
        text, _ = reader.read_chat(_TURNS)
    except (SpecdecError, TypeError):
        return False
    return all(
        call["name"] in (text or "") and call["arguments"]["b"][0] in (text or "")
        for call in _CALLS
    )


class CallReader:
    """Takes an answer apart while it is written: text, and calls once they are complete.

    What could be the beginning of a mark is held back, and so is whitespace, which is dropped in
    front of a call and behind one.
    """

    def __init__(self) -> None:
        self._rest = ""  # not given out
        self._in_call = False
        self._looked = 0  # characters of the call in which no end was found
        self._num_calls = 0

    def feed(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        """What the piece completes: text, and calls as {"name": ..., "arguments": ...}."""
        self._rest += piece
        text = ""
        calls: list[dict[str, Any]] = []
        while True:
            if not self._in_call:
                text += self._text()
                if not self._in_call:
                    return text, calls
            call = self._call()
            if call is None:
                return text, calls
            calls.append(call)

    def finish(self) -> str:
        """The text that was held back: of a call that was cut, all of it."""
        rest = OPENING + self._rest if self._in_call else self._rest
        self._rest, self._in_call = "", False
        return rest.lstrip() if self._num_calls else rest

    def _text(self) -> str:
        """Text in front of the next mark, or what can be no part of one."""
        if self._num_calls:
            self._rest = self._rest.lstrip()
        text, found, rest = self._rest.partition(OPENING)
        if found:
            self._rest, self._in_call, self._looked = rest, True, 0
            return text.rstrip()
        held = max(n for n in range(len(OPENING)) if text.endswith(OPENING[:n]))
        kept = text[: len(text) - held].rstrip()
        self._rest = text[len(kept) :]
        return kept

    def _call(self) -> dict[str, Any] | None:
        """The call whose end has come. A closing mark may also be a part of a string in it."""
        while (end := self._rest.find(CLOSING, self._looked)) >= 0:
            try:
                call: dict[str, Any] = json.loads(self._rest[:end])
            except ValueError:
                self._looked = end + 1
                continue
            self._rest, self._in_call = self._rest[end + len(CLOSING) :], False
            self._num_calls += 1
            return call
        self._looked = max(self._looked, len(self._rest) - len(CLOSING) + 1)
        return None
