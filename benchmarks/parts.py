"""A long benchmark in parts: what is measured is kept, and the next call goes on behind it.

A part is a figure that is measured in one go (a round of a cell, a case). Parts lie in a file of
their own below .data/parts/, one for each commit and settings, so that parts of two builds never
meet; it is written after each part, whole or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from typing import Any

from benchmarks import common, datasets

FOLDER = datasets.DATA_DIR / "parts"


class Parts:
    """The parts of benchmark `name` with `settings` (JSON-ready: all that a figure depends on).

    minutes  how long this call may measure; None: to the end
    """

    def __init__(self, name: str, settings: dict[str, Any], minutes: float | None = None) -> None:
        key = {"commit": common.commit(), "host": common.device_kind(), **settings}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.file = FOLDER / f"{name}-{digest[:12]}.json"
        self._content: dict[str, Any] = {"key": key, "loads": [], "parts": {}}
        if self.file.is_file():
            self._content = json.loads(self.file.read_text())
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._longest = 0.0
        self._begun = time.monotonic()

    def get(self, part: str) -> Any:
        """What was measured; None: nothing yet."""
        return self._content["parts"].get(part)

    def begin(self) -> bool:
        """A part is about to be measured. False: there is no time for one like the longest."""
        self._begun = time.monotonic()
        return self._end is None or self._begun + self._longest <= self._end

    def put(self, part: str, figures: Any) -> None:
        """Keep what was measured since begin()."""
        self._longest = max(self._longest, time.monotonic() - self._begun)
        self._content["parts"][part] = figures
        self._content["loads"].append(common.load_average()[0])
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".tmp")
        partial.write_text(json.dumps(self._content))
        os.replace(partial, self.file)

    def load_behind(self, part: str) -> float:
        """The machine's load when a part that is kept had been measured."""
        return float(self._content["loads"][list(self._content["parts"]).index(part)])

    @property
    def loads(self) -> list[float]:
        """The machine's load behind each part."""
        return list(self._content["loads"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, metavar="M",
        help="measure for so long; the same command goes on with what is missing",
    )  # fmt: skip
