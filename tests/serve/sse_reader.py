"""Reads server-sent events, as far as these servers write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["choice_text", "chunks", "events"]


def events(text: str) -> Iterator[tuple[str | None, str]]:
    """(name, data) of the events of a body; comments are pings."""
    for block in text.split("\n\n"):
        fields = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        data = "\n".join(value for name, _, value in fields if name == "data")
        if fields:
            yield next((value for name, _, value in fields if name == "event"), None), data


def chunks(text: str) -> list[Any]:
    """The objects of a completion's body, which must end with [DONE]."""
    found = [data for _, data in events(text)]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


def choice_text(parts: Iterable[Any], index: int = 0) -> str:
    """What a chat or a completion streamed as choice `index`."""
    text = ""
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text
