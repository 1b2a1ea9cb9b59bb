"""T(rows, context) without a measurement: remembered from earlier runs or guessed, then corrected
by the steps that are served.

A table belongs to a model's files, its number format, the machine, the threads and the build of the
extension. Each is a file of its own below the cache root; an engine folder may hold one beside its
weights. Without either, a first run guesses from bytes and rows. A table decides how much is
drafted, never which tokens come out.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _core
from .._core import StepCost
from ..installation import cpu_name
from ..log import logger
from ..models.base import StepModel
from ..models.config_reader import DTYPES
from ..models.folder_cache import cache_root
from ..models.kv_storage import stored_name, token_bytes
from .step_cost import ROW_COUNTS

__all__ = [
    "TABLE_FILE",
    "ServedCost",
    "cost_key",
    "guess_cost",
    "recall",
    "remember",
    "shipped",
    "write_table",
]

FORMAT, VERSION = "specdec_ext step cost", 1
TABLE_FILE = "step_cost.json"  # of a model folder that brings its table
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_MOST_BYTES = 1 << 16  # of a file that is read
_MOST_FILES = 64  # the least recently written ones go
_FIRST_SAVE = 64  # steps that were served; then at each doubling, and at the end from _LEAST on
_LEAST = 16
_GUESS_CONTEXT = 128.0
# What one more row adds to a pass, as a share of the time for reading the weights; the first steps
# that are served correct it. Reading floats takes longer than multiplying a few rows by them, which
# hides the arithmetic (benchmarks.step_cost: 8 rows take 1.15 to 1.18 times as long as one, 84 rows
# 8.5 to 8.9 times; where tiles multiply bfloat16, 1.2, 3.3 and for 128 rows 4.6 times). Blocks of 8
# bits and less have fewer bytes and must be unpacked: they hide nothing.
_NARROW_ROW_SHARE = 0.15
# Where they are widened for tiles (e4m3 always, others in fast numerics) 16, 84 and 128 rows cost
# 2.1, 6.5 and 9.6 times; e4m3 1.7, 6.2 and 8.
_WIDENED_ROW_SHARE = 0.067
_WIDE_ROW_SHARE, _TILE_ROW_SHARE, _HIDDEN_ROW_SHARE = 0.11, 0.036, 0.02
# Bytes per second, of about two cores. Budgets only compare times of passes, and the first steps
# correct this number; measuring it would delay the first token more than it is worth.
_READ_RATE = 2e10


def cost_key(model: StepModel, *, recorded: bool = False) -> dict[str, Any]:
    """What a table of `model`, as it is loaded, is valid for; JSON-ready.

    recorded  its passes are launched as graphs
    """
    info = model.info
    files = []
    for file in sorted(info.path.iterdir()) if info.path.is_dir() else [info.path]:
        if file.suffix in _WEIGHTS or file.name == "config.json":
            about = file.stat()
            files.append([file.name, about.st_size, about.st_mtime_ns])
    build = os.stat(_core.__file__)
    key = {
        "files": files,
        "dtype": info.dtype,
        "kv_dtype": stored_name(model),
        "impl": [info.impl, info.numerics, info.device],
        "cpu": cpu_name(),
        "isa": _core.cpu_isa(),
        "threads": _core.num_threads(),
        "ranks": getattr(getattr(model, "shard", None), "size", 1),
        "build": [_core.__version__, build.st_size, build.st_mtime_ns],
    }
    if recorded:
        key["recorded"] = True
    return key


def _file_of(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_root() / "step_cost" / f"{digest[:24]}.json"


def recall(key: dict[str, Any]) -> StepCost | None:
    """The table that was remembered for `key`; None: there is none, or the file says nothing."""
    file = _file_of(key)
    found = _read_table(file)
    if found is not None and found[0] != key:
        logger.warning("%s is ignored and will be written anew: it is of another model", file)
        return None
    return None if found is None else found[1]


def shipped(folder: Path, key: dict[str, Any]) -> StepCost | None:
    """The table that lies with a model's weights, if it was measured on such a machine; None
    otherwise. The files are those of the folder, and another build of this version is as fast."""
    found = _read_table(folder / TABLE_FILE)
    if found is None:
        return None
    same = [name for name in key if name not in ("files", "build")]
    other = [name for name in same if found[0].get(name) != key[name]]
    if other:
        logger.info("%s was measured with other %s", folder / TABLE_FILE, ", ".join(other))
        return None
    return found[1]


def _read_table(file: Path) -> tuple[dict[str, Any], StepCost] | None:
    try:
        with file.open("rb") as source:
            text = source.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = json.loads(text)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError("it is of another format")
        key = dict(content["key"])
        rows, seconds, growth = (content[name] for name in ("rows", "seconds", "growth"))
        counts = [count for count in rows if type(count) is int]
        if counts != list(rows) or counts != sorted(set(counts)) or len(counts) > len(ROW_COUNTS):
            raise ValueError("its row counts are none")
        return key, StepCost(
            dict(zip(rows, seconds, strict=True)),
            dict(zip(rows, growth, strict=True)),
            content["context_len"],
            tuple(content.get("prefill", (1.0, 1.0))),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        logger.warning("%s is ignored and will be written anew: %s", file, error)
        return None


def write_table(file: Path, key: dict[str, Any], cost: StepCost, observed: int) -> None:
    """The table for `key`, whole or not at all. Raises OSError."""
    rows, seconds, context_len, growth, prefill = cost.columns
    content = {
        "format": FORMAT,
        "version": VERSION,
        "key": key,
        "rows": rows,
        "seconds": seconds,
        "context_len": context_len,
        "growth": growth or [0.0] * len(rows),
        "prefill": prefill,
        "observed": observed,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as target:
            json.dump(content, target)
            # mkstemp's files are their owner's alone; this one travels in engines
            os.fchmod(target.fileno(), 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remember(key: dict[str, Any], cost: StepCost, observed: int) -> None:
    """Write the table for `key` below the cache root. Raises OSError."""
    file = _file_of(key)
    write_table(file, key, cost, observed)
    written = sorted(file.parent.glob("*.json"), key=lambda f: f.stat().st_mtime_ns)
    for old in written[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


def guess_cost(model: StepModel) -> StepCost:
    """A pass reads its weights, and each request its K/V, at _READ_RATE."""
    info = model.info
    weights = max(info.weight_bytes, 1) / _READ_RATE
    token = token_bytes(model, str(stored_name(model))) / _READ_RATE
    has_tiles = info.device == "cpu" and _core.cpu_isa() == "amx"
    if info.dtype in DTYPES:  # floats; weights in blocks have other names
        multiplies = has_tiles and info.dtype == "bfloat16"
        row_share = _TILE_ROW_SHARE if multiplies else _WIDE_ROW_SHARE
        share = {n: max(1.0 + _HIDDEN_ROW_SHARE * (n - 1), row_share * n) for n in ROW_COUNTS}
    else:
        widens = getattr(model, "has_fast_forms", False)
        widens = widens or (has_tiles and info.dtype.startswith(("f8", "fp8")))
        row_share = _WIDENED_ROW_SHARE if widens else _NARROW_ROW_SHARE
        share = {n: 1.0 + row_share * (n - 1) for n in ROW_COUNTS}
    return StepCost(
        {n: weights * part for n, part in share.items()},
        {n: token * part for n, part in share.items()},
        _GUESS_CONTEXT,
    )


class ServedCost:
    """The table of one model, from the first step on.

    tell      called with every new table, the first one by start()
    recorded  see cost_key()
    """

    def __init__(
        self, model: StepModel, tell: Callable[[StepCost], object], *, recorded: bool = False
    ) -> None:
        self._key = cost_key(model, recorded=recorded)
        self._tell = tell
        table = recall(self._key) or shipped(model.info.path, self._key)
        self.is_guess = table is None
        guess = guess_cost(model)
        self._times = _core.StepTimes(table or guess, guess)
        self._save_at = _FIRST_SAVE
        self._saved = 0

    @property
    def cost(self) -> StepCost:
        return self._times.cost

    def measured(self, cost: StepCost | None) -> None:
        """It was measured just now. None: there was too little room to tell."""
        if cost is not None:
            self._times, self.is_guess = _core.StepTimes(cost), False
            self._save()

    def start(self) -> None:
        """Tell the first table."""
        self._tell(self._times.cost)

    def observe(self, plan: Any, seconds: float) -> None:
        """The forward pass of `plan` (a StepPlan) took so long."""
        if self._times.observe(plan, seconds):
            self._tell(self._times.cost)
            if self._times.observed >= self._save_at:
                self._save_at *= 2
                self._save()

    def close(self) -> None:
        """Remember what the last steps showed."""
        if self._times.observed >= max(_LEAST, self._saved + 1):
            self._save()

    def _save(self) -> None:
        try:
            remember(self._key, self._times.cost, self._times.observed)
        except OSError as error:
            logger.info("the step cost is not remembered: %s", error)
            self._save_at = 1 << 62
        self._saved = self._times.observed
