"""Articles and their summaries: files that the user names, or the papers of aclsum.

A file of JSON lines, or a folder of such files (.jsonl, .json), with the fields of CNN/DailyMail:
`article` and `highlights`; `document`/`text` and `summary` are accepted names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.validate import show
from ..errors import ConfigError
from .fetched_file import FetchedFile

__all__ = ["Article", "read_articles"]

_PAPERS = FetchedFile(
    "aclsum",  # MIT
    "0.1.2",
    "aclsum/dataset/test.jsonl",
    "491ee57a8bb2bc65af4c7c1cfe5a114dc140b093fc24c242a21785ea4ed9786f",
    "the papers",
    "name a data set of your own with --dataset_dir",
)
_TEXT, _SUMMARY = ("article", "document", "text"), ("highlights", "summary")
_PARTS = ("test", "validation", "val", "train")  # of a folder with several, the first there is


@dataclass(frozen=True)
class Article:
    """name: where it comes from, for reports and errors."""

    name: str
    text: str
    summary: str


def read_articles(source: str | Path | None, limit: int) -> list[Article]:
    """The first `limit` articles of a file or folder; None: papers of aclsum, fetched once.

    Raises ConfigError naming file, line and field; ModelError when the papers cannot be fetched.
    """
    if source is None:
        return [_paper(row) for row in _rows(_PAPERS.path(), limit)]
    path = Path(source).expanduser()
    if path.is_dir():
        path = _file_of(path)
    if not path.is_file():
        raise ConfigError(
            f"--dataset_dir {str(path)!r}: no such file or folder; give JSON lines with article "
            "and highlights, or leave it out for the papers of aclsum"
        )
    rows = list(_rows(path, limit))
    if not rows:
        raise ConfigError(f"{path}: holds no article; one JSON object per line")
    return [
        Article(place, _field(place, row, _TEXT), _field(place, row, _SUMMARY))
        for place, row in rows
    ]


def _file_of(folder: Path) -> Path:
    files = sorted(file for suffix in ("jsonl", "json") for file in folder.glob(f"**/*.{suffix}"))
    files = [file for file in files if file.name not in ("dataset_info.json", "state.json")]
    for part in _PARTS:
        for file in files:
            if file.stem.startswith(part):
                return file
    if not files:
        raise ConfigError(
            f"--dataset_dir {str(folder)!r}: no .jsonl or .json file in it; save the data set as "
            "JSON lines (datasets: dataset.to_json(FILE))"
        )
    return files[0]


def _rows(path: Path, limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    count = 0
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if count == limit:
                return
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not JSON ({error}); one object per line") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: {show(row)}: expected an object")
            count += 1
            yield place, row


def _field(place: str, row: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
        if value is not None:
            raise ConfigError(f"{place}: {name} = {show(value)}: expected text that is not empty")
    raise ConfigError(
        f"{place}: field {names[0]!r} is missing (there are {', '.join(map(str, row)) or 'none'}); "
        f"accepted names: {', '.join(names)}"
    )


def _paper(entry: tuple[str, dict[str, Any]]) -> Article:
    """Abstract, introduction and conclusion; its summary: challenge, approach and outcome."""
    _, row = entry
    text = "\n\n".join(" ".join(part) for part in row["sentences"].values())
    return Article(str(row["id"]), text, "\n".join(row["summary"].values()))
