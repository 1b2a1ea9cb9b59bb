"""Rows of .parquet files and of folders that `datasets` saved, by pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..extras import require

__all__ = ["is_arrow", "read_arrow"]

_ROWS_AT_ONCE = 1024


def is_arrow(path: Path) -> bool:
    """A .parquet or .arrow file, or a folder with any: then read_arrow() can say what it is."""
    if path.is_dir():
        return (path / "dataset_dict.json").is_file() or bool(_files(path))
    return path.suffix.lower() in (".parquet", ".arrow")


def _files(folder: Path) -> list[Path]:
    state = folder / "state.json"
    if state.is_file():  # the order that save_to_disk states, and no stale file beside them
        try:
            names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{state}: cannot be read ({error}); save the data again") from error
        return [folder / str(name) for name in names]
    return sorted((*folder.rglob("*.parquet"), *folder.glob("*.arrow")))


def read_arrow(path: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """(file, row from 1 on, record). Raises ConfigError, also where pyarrow is not installed."""
    if (path / "dataset_dict.json").is_file():
        names = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        if "train" not in names:
            raise ConfigError(
                f"{path}: holds the splits {', '.join(names) or 'none'}; give the folder of one"
            )
        path = path / "train"
    require("pyarrow", f"data = {str(path)!r}")
    for file in _files(path) if path.is_dir() else [path]:
        yield from _rows(file)


def _rows(file: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    import pyarrow as pa  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-not-found,import-untyped,unused-ignore]

    row = 0
    try:
        if file.suffix.lower() == ".parquet":
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(_ROWS_AT_ONCE):
                    for record in batch.to_pylist():
                        row += 1
                        yield file, row, record
            return
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                for record in batch.to_pylist():
                    row += 1
                    yield file, row, record
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{file}: cannot be read after row {row} ({error}); write the data again"
        ) from error
