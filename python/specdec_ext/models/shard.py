"""Which part of every weight a rank of a tensor-parallel model holds.

In exact mode every projection is split by output rows and reads its whole input, so a number is
computed by one rank, with the bits that it has on one rank alone. In fast mode the output and the
down projection are split by input columns, and the ranks' sums are added up: half as many exchanges
(docs/tensor_parallel.md).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from ..errors import ConfigError, UnsupportedModelError
from .block_config import BLOCKS
from .native_config import NativeShape

__all__ = ["Shard", "kv_heads_of_ranks", "take_columns"]

# Columns of one panel of packed weights: what ranks share out.
_PANEL = 32
_OF_HIDDEN = ("o_proj", "down_proj")
_OF_FFN = ("gate_proj", "up_proj")
_TABLES = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class Shard:
    """Bounds [size + 1] of what the ranks compute; rank r has bounds[r] to bounds[r + 1].

    kv_heads  key heads, with the query heads that read them
    hidden    outputs of the attention's and the feed-forward's last projection
    ffn       outputs of gate and up
    head      tokens that are scored
    sums      fast mode: partial sums are added up; `hidden` does not count then
    """

    rank: int
    size: int
    kv_heads: tuple[int, ...]
    hidden: tuple[int, ...]
    ffn: tuple[int, ...]
    head: tuple[int, ...]
    queries: int  # rows of q of one key head
    head_dim: int
    sums: bool = False

    @staticmethod
    def of(shape: NativeShape, rank: int, size: int, *, sums: bool = False) -> Shard:
        """Raises ConfigError where a rank would have nothing to compute."""
        if size > shape.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size = {size}: the model has {shape.num_kv_heads} K/V heads and "
                f"a rank needs at least one; use tensor_parallel_size <= {shape.num_kv_heads} "
                f"(--tp_size {shape.num_kv_heads})"
            )
        panels = -(-shape.intermediate_size // _PANEL)
        if panels < size:
            raise ConfigError(
                f"tensor_parallel_size = {size}: the model's intermediate_size = "
                f"{shape.intermediate_size} has {panels} panels of {_PANEL} and a rank needs at "
                "least one; use fewer ranks"
            )
        return Shard(
            rank,
            size,
            _bounds(shape.num_kv_heads, 1, size),
            _bounds(shape.hidden_size, _unit(shape.hidden_size, size), size),
            _bounds(shape.intermediate_size, _PANEL, size),
            _bounds(shape.vocab_size, _unit(shape.vocab_size, size), size),
            shape.num_heads // shape.num_kv_heads * shape.head_dim,
            shape.head_dim,
            sums,
        )

    @property
    def num_kv_heads(self) -> int:
        """K/V heads that this rank holds."""
        return self.kv_heads[self.rank + 1] - self.kv_heads[self.rank]

    def scores(self, rank: int) -> slice:
        """Columns of the scores that a rank computes."""
        return slice(self.head[rank], self.head[rank + 1])

    def rows(self, name: str) -> slice | None:
        """Rows of the checkpoint's tensor that this rank loads; None: all. Rank 0 has all
        embeddings and the whole head, for drafters and for the first layer's input."""
        module, _, _ = name.rpartition(".")
        last = module.rpartition(".")[2]
        if module in _TABLES:
            return None if self.rank == 0 else self.scores(self.rank)
        if last == "q_proj":
            return self._part(self.kv_heads, self.queries)
        if last in ("k_proj", "v_proj"):
            return self._part(self.kv_heads, self.head_dim)
        if last in _OF_HIDDEN:
            return None if self.sums else self._part(self.hidden)
        return self._part(self.ffn) if last in _OF_FFN else None

    def reads(self, name: str, *, tied: bool) -> bool:
        """Whether this rank needs the tensor at all: embeddings are rank 0's, unless they are the
        head as well."""
        return self.rank == 0 or tied or not name.startswith(_TABLES[0])

    def columns(self, name: str) -> slice | None:
        """Columns of the checkpoint's tensor that this rank keeps; None: all."""
        if not self.sums or not name.endswith(".weight"):
            return None
        last = name.rpartition(".")[0].rpartition(".")[2]
        if last == "o_proj":
            return self._part(self.kv_heads, self.queries)
        return self._part(self.ffn) if last == "down_proj" else None

    def holds(self, name: str) -> bool:
        """Whether this rank has any of the tensor: a bias is added to a sum once, by rank 0."""
        module, _, kind = name.rpartition(".")
        is_summed = self.sums and module.rpartition(".")[2] in _OF_HIDDEN
        return not (is_summed and kind == "bias" and self.rank > 0)

    def decoder_arguments(self) -> dict[str, Any]:
        """_core.LlamaDecoder's keywords."""
        return {
            "shard_rank": self.rank,
            "kv_head_bounds": list(self.kv_heads),
            "hidden_bounds": list(self.hidden),
            "ffn_bounds": list(self.ffn),
            "head_bounds": list(self.head),
            "adds_partial_sums": self.sums,
        }

    def _part(self, bounds: tuple[int, ...], unit: int = 1) -> slice:
        return slice(bounds[self.rank] * unit, bounds[self.rank + 1] * unit)


def kv_heads_of_ranks(num_kv_heads: int, size: int) -> list[int]:
    """How many K/V heads each rank holds."""
    bounds = _bounds(num_kv_heads, 1, size)
    return [last - first for first, last in itertools.pairwise(bounds)]


def take_columns(weight: Any, columns: slice, width: int, name: str) -> Any:
    """Columns of a matrix [N, width], floats or (blocks, format), where they lie.

    Raises UnsupportedModelError where they are no whole blocks.
    """
    if not isinstance(weight, tuple):
        if isinstance(weight, _core.Bfloat16Array):
            return _core.Bfloat16Array(np.ascontiguousarray(weight.bits[:, columns]))
        return np.ascontiguousarray(weight[:, columns])
    blocks, format = weight
    block = BLOCKS[format][0]
    if columns.start % block or (columns.stop % block and columns.stop != width):
        raise UnsupportedModelError(
            f"{name}: numerics = 'fast' on several ranks splits its rows at column "
            f"{columns.stop if columns.start == 0 else columns.start}, {format} has blocks of "
            f"{block}; use numerics = 'exact', or another tensor_parallel_size"
        )
    unit = blocks.shape[1] * block // width
    first, last = columns.start // block * unit, -(-columns.stop // block) * unit
    return np.ascontiguousarray(blocks[:, first:last]), format


def _unit(width: int, size: int) -> int:
    """Rows that stay together: a panel, or one row where there are too few panels."""
    return _PANEL if width > _PANEL * (size - 1) else 1


def _bounds(width: int, unit: int, size: int) -> tuple[int, ...]:
    """Near-equal shares in whole units, the first ranks' the larger."""
    units = -(-width // unit)
    return tuple(min(width, -(-units * rank // size) * unit) for rank in range(size + 1))
