"""A checkpoint that was converted for several ranks: each one's rows of every tensor lie in a
folder of their own, and a rank reads no other.

ranks.json in the model folder says for how many: {"tp_size": N}. The weights of rank r lie in
rank<r>/, safetensors shards with their index, cut as models/shard.py says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config.ranks import MAX_RANKS
from ..errors import ConfigError, ModelError
from .block_checkpoint import BlockCheckpoint
from .checkpoint_view import CheckpointView
from .host_arrays import HostArray
from .json_file import read_json
from .shard import Shard
from .weights import Checkpoint

__all__ = [
    "RANKS_FILE",
    "RankCheckpoint",
    "check_ranks",
    "rank_folder",
    "read_ranks",
    "write_ranks",
]

RANKS_FILE = "ranks.json"


def rank_folder(model: Path, rank: int) -> Path:
    """Where the weights of a rank lie."""
    return model / f"rank{rank}"


def write_ranks(model: Path, tp_size: int) -> None:
    """Say for how many ranks a folder was converted."""
    (model / RANKS_FILE).write_text(json.dumps({"tp_size": tp_size}) + "\n")


def read_ranks(model: Path) -> int:
    """For how many ranks a model was converted; 1: as a whole. Raises ModelError."""
    path = model / RANKS_FILE
    if not path.is_file():
        return 1
    size = read_json(path, "the number of ranks").get("tp_size")
    if type(size) is not int or not 2 <= size <= MAX_RANKS:
        raise ModelError(
            f"{path}: tp_size = {size!r}: expected 2..{MAX_RANKS}; convert the model again"
        )
    return size


def check_ranks(model: Path, size: int) -> None:
    """Raises ConfigError where a model was converted for another number of ranks than `size`."""
    made_for = read_ranks(model)
    if made_for in (1, size):
        return
    raise ConfigError(
        f"{model}: converted with tp_size = {made_for}, asked for tensor_parallel_size = {size}: a "
        f"rank has its own shards alone; use tensor_parallel_size={made_for} (--tp_size "
        f"{made_for}), or convert again with --tp_size={size}"
    )


class RankCheckpoint(CheckpointView["Checkpoint | BlockCheckpoint"]):
    """The tensors of one rank, as Checkpoint and BlockCheckpoint give them.

    blocks  tensor name -> format of the matrices that are bytes
    tied    the embeddings are the head

    Raises ModelError.
    """

    def __init__(self, model: Path, shard: Shard, blocks: Mapping[str, str], *, tied: bool) -> None:
        self._shard, self._tied = shard, tied
        folder = rank_folder(model, shard.rank)
        if not folder.is_dir():
            raise ModelError(
                f"{folder}: the shards of rank {shard.rank} of {shard.size} are missing; copy the "
                "whole checkpoint, or convert the model again"
            )
        own = {name: kind for name, kind in blocks.items() if shard.reads(name, tied=tied)}
        super().__init__(BlockCheckpoint(folder, own) if own else Checkpoint(folder))

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignored: Iterable[str] = (),
        ignored_suffixes: tuple[str, ...] = (),
    ) -> None:
        """It must hold exactly this rank's rows of `expected` (name -> shape of the whole)."""
        own = {
            name: self._own_shape(name, shape)
            for name, shape in expected.items()
            if self._shard.reads(name, tied=self._tied)
        }
        self.files.check(own, ignored=ignored, ignored_suffixes=ignored_suffixes)

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """This rank's rows of a tensor, which `rows` must be, as floats."""
        self._check_rows(name, rows)
        return self.files.load(name, dtype)

    def weight(self, name: str, rows: slice | None = None) -> Any:
        """This rank's rows of a tensor, which `rows` must be, as they are stored."""
        self._check_rows(name, rows)
        read: Callable[[str], Any] = getattr(self.files, "weight", self.files.load)
        return read(name)

    def _own_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows = self._shard.rows(name)
        return tuple(shape) if rows is None else (rows.stop - rows.start, *shape[1:])

    def _check_rows(self, name: str, rows: slice | None) -> None:
        if rows != self._shard.rows(name):
            raise ValueError(f"{name}: rows {rows} are not those of rank {self._shard.rank}")
