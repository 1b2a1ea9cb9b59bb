"""The user's own data: files of conversations, instructions or plain text, checked before any work.

A file holds one format, told by the keys of its first record:

    messages        {"messages": [{"role": "user", "content": "..."}, ...]}
    sharegpt        {"conversations": [{"from": "human", "value": "..."}, ...]}
    alpaca          {"instruction": "...", "input": "...", "output": "..."}
    pairs           {"prompt": "...", "completion": "..."}
    text            {"text": "..."}, or a .txt or .md file

Records are the lines of .jsonl, the list of .json, the rows of .parquet and of a folder that
`datasets` saved. What cannot be used is one ConfigError with file, line and remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError
from ..text.chat_template import check_messages
from .arrow import is_arrow, read_arrow

__all__ = ["FORMATS", "Example", "read_examples"]

# Format -> its keys, those that are enough for prompts first.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "pairs": ("prompt", "completion"),
    "text": ("text",),
}
_SPELLINGS = {"response": "completion"}
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
_PLAIN = (".txt", ".md", ".text")


@dataclass(frozen=True)
class Example:
    """One text to train on, or one prompt for the target to answer.

    messages  what comes before the answer; empty: `answer` is a plain text
    answer    None: the target writes it
    place     file and line, for errors
    """

    messages: tuple[Mapping[str, str], ...]
    answer: str | None
    category: str
    place: str


def read_examples(paths: Sequence[Path], *, prompts: bool) -> list[Example]:
    """All examples of all files, in their order; every record is checked.

    prompts  the target writes the answers: those of the files are left out

    A conversation gives one example for each of its answers; as a prompt it is read up to the last
    user's turn. Raises ConfigError.
    """
    examples: list[Example] = []
    for path in paths:
        found = list(_of_file(Path(path).expanduser(), prompts))
        if not found:
            raise ConfigError(f"{path}: holds no record; give a file with at least one text")
        examples += found
    return examples


def _of_file(path: Path, prompts: bool) -> Iterator[Example]:
    if not path.exists():
        raise ConfigError(f"data = {str(path)!r}: no such file or folder; {_remedy()}")
    if path.suffix.lower() in _PLAIN and path.is_file():
        yield from _plain(path, prompts)
        return
    kind = ""
    for place, record in _records(path):
        if not isinstance(record, Mapping):
            raise ConfigError(
                f"{place}: a {type(record).__name__} in the place of an object; {_remedy()}"
            )
        record = {_SPELLINGS.get(str(key), str(key)): value for key, value in record.items()}
        own = _format_of(record)
        if own is None:
            keys = ", ".join(map(repr, list(record)[:6])) or "none"
            raise ConfigError(f"{place}: its keys are {keys}; {_remedy()}")
        if kind and own != kind:
            raise ConfigError(
                f"{place}: a record of format {own!r}, those before it are {kind!r}; a file holds "
                "one format: split it, and give both files"
            )
        kind = own
        yield from _READERS[kind](place, record, prompts)


def _remedy() -> str:
    return "expected 'messages', 'conversations', 'instruction' and 'output', 'prompt' and " \
        "'completion', or 'text' (docs/training.md)"  # fmt: skip


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, record) of a file or folder."""
    if is_arrow(path):
        for file, row, record in read_arrow(path):
            yield f"{file}, row {row}", record
        return
    suffix = path.suffix.lower()
    if path.is_dir() or suffix not in (".jsonl", ".json"):
        raise ConfigError(
            f"{path}: not a data file; give .jsonl, .json, .txt, .md or .parquet, or a folder that "
            "datasets.save_to_disk or to_parquet wrote"
        )
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); convert it") from error
    if suffix == ".json":
        values = _loads(str(path), content)
        if not isinstance(values, list):
            raise ConfigError(f"{path}: a .json file holds a list of records; use .jsonl for lines")
        yield from ((f"{path}, record {i}", value) for i, value in enumerate(values, 1))
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _loads(place, line)


def _loads(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); correct or remove it") from error


def _format_of(record: Mapping[str, Any]) -> str | None:
    return next((kind for kind, keys in FORMATS.items() if keys[0] in record), None)


def _text(place: str, record: Mapping[str, Any], key: str, *, empty: bool = False) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not (empty or value.strip()):
        said = "is missing" if value is None else "is empty" if value == "" else f"= {value!r:.60}"
        raise ConfigError(f"{place}: {key!r} {said}: expected text; fill it in or remove the line")
    return value


def _of_messages(place: str, messages: object, prompts: bool, kind: str) -> Iterator[Example]:
    try:
        checked = check_messages(messages)
    except RequestError as error:
        raise ConfigError(f"{place}: {error}; correct or remove it") from None
    if prompts:
        last = max((i for i, m in enumerate(checked) if m["role"] in ("user", "tool")), default=-1)
        if last < 0:
            raise ConfigError(f"{place}: the conversation has no user's turn; add one or remove it")
        yield Example(tuple(checked[: last + 1]), None, kind, place)
        return
    answers = [i for i, m in enumerate(checked) if m["role"] == "assistant" and i]
    if not answers or not all(checked[i]["content"].strip() for i in answers):
        raise ConfigError(
            f"{place}: a conversation without an answer; add the assistant's turn, or use "
            "--prompts in place of --data: then the target writes the answers"
        )
    for i in answers:
        yield Example(tuple(checked[:i]), checked[i]["content"], kind, place)


def _messages(place: str, record: Mapping[str, Any], prompts: bool) -> Iterator[Example]:
    yield from _of_messages(place, record["messages"], prompts, "messages")


def _sharegpt(place: str, record: Mapping[str, Any], prompts: bool) -> Iterator[Example]:
    turns = record["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ConfigError(f"{place}: 'conversations' is a {type(turns).__name__}: expected a list "
                          "of turns; correct or remove it")  # fmt: skip
    messages = []
    for i, turn in enumerate(turns):
        said = turn if isinstance(turn, Mapping) else {}
        speaker, value = said.get("from", said.get("role")), said.get("value", said.get("content"))
        if speaker not in _SPEAKERS:
            raise ConfigError(
                f"{place}: conversations[{i}].from = {speaker!r}: expected human, gpt or system; "
                "correct or remove it"
            )
        messages.append({"role": _SPEAKERS[speaker], "content": value})
    yield from _of_messages(place, messages, prompts, "sharegpt")


def _alpaca(place: str, record: Mapping[str, Any], prompts: bool) -> Iterator[Example]:
    question = _text(place, record, "instruction")
    more = _text(place, {"input": record.get("input") or ""}, "input", empty=True)
    question = f"{question}\n\n{more}" if more.strip() else question
    answer = None if prompts else _text(place, record, "output")
    yield Example(({"role": "user", "content": question},), answer, "alpaca", place)


def _pairs(place: str, record: Mapping[str, Any], prompts: bool) -> Iterator[Example]:
    question = _text(place, record, "prompt")
    answer = None if prompts else _text(place, record, "completion")
    yield Example(({"role": "user", "content": question},), answer, "pairs", place)


def _document(place: str, record: Mapping[str, Any], prompts: bool) -> Iterator[Example]:
    text = _text(place, record, "text")
    if prompts:
        yield Example(({"role": "user", "content": text},), None, "text", place)
    else:
        yield Example((), text, "text", place)


_READERS = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "pairs": _pairs,
    "text": _document,
}


def _plain(path: Path, prompts: bool) -> Iterator[Example]:
    """A text file: one text, or a prompt on every line."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); convert it") from error
    if not prompts:
        if content.strip():
            yield Example((), content, "text", str(path))
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            message = {"role": "user", "content": line.strip()}
            yield Example((message,), None, "text", f"{path}, line {number}")
