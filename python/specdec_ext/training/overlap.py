"""Do two bodies of text share a run of 13 words? The usual test for evaluation text in training.

Words are maximal runs of letters and digits, in lower case: neither punctuation nor spacing nor
markup hides a copy. Our runs are kept as 64-bit hashes and the other side, which may be large, is
streamed past them; a hit by hash is compared word by word before it counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["NGRAM", "read_texts", "shared_runs"]

NGRAM = 13
_WORD = re.compile(r"[^\W_]+")


def _runs(text: str) -> Iterator[tuple[int, str]]:
    """(hash, words) of every run of 13 words."""
    words = _WORD.findall(text.lower())
    for i in range(len(words) - NGRAM + 1):
        run = " ".join(words[i : i + NGRAM])
        yield int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "little"), run


def shared_runs(ours: Sequence[str], theirs: Iterable[str]) -> dict[int, str]:
    """Index of each text of `ours` that shares a run with any of `theirs` -> one such run."""
    owners: dict[int, list[int]] = {}
    for index, text in enumerate(ours):
        for key, _ in _runs(text):
            holders = owners.setdefault(key, [])
            if not holders or holders[-1] != index:
                holders.append(index)
    found: dict[int, str] = {}
    for text in theirs:
        for key, run in _runs(text):
            for index in owners.get(key, ()):
                if index not in found and any(run == mine for _, mine in _runs(ours[index])):
                    found[index] = run
    return found


def read_texts(path: str | Path) -> Iterator[str]:
    """The texts of a file: every string of a .json or .jsonl file, else the whole file.

    Raises ConfigError when it cannot be read.
    """
    file = Path(path).expanduser()
    try:
        content = file.read_text(encoding="utf-8-sig", errors="replace")
        if file.suffix == ".jsonl":
            for line in content.split("\n"):
                if line.strip():
                    yield from _strings(json.loads(line))
        elif file.suffix == ".json":
            yield from _strings(json.loads(content))
        else:
            yield content
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"exclude = {str(file)!r}: cannot be read ({error}); give a text, .json or .jsonl file"
        ) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
