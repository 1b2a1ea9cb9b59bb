"""Checkpoints of families that keep several projections in one matrix, as the decoder asks for
them: each projection by its own name.

Which rows of which matrix a projection is, is said here and nowhere else. In the folders of a
converted model (convert.py) such a matrix stays one; only where ranks have shards of their own are
its projections apart, and then as they are given here (rank_checkpoint.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoint_view import CheckpointView
from .host_arrays import HostArray, row_slice, take_rows
from .quant_checkpoint import QuantCheckpoint
from .rope import rotary_dim

if TYPE_CHECKING:
    from .block_checkpoint import BlockCheckpoint
    from .config_reader import ModelConfig
    from .gguf_weights import GgufCheckpoint
    from .weights import Checkpoint

__all__ = ["FusedCheckpoint", "RowsOf", "fused_rows"]


@dataclass(frozen=True)
class RowsOf:
    """A projection: `count` rows of the tensor `source`, from `first` on.

    order  of the rows within each head: the decoder rotates element i of a head with element
           i + head_dim / 2, also where a family rotates the first elements of a head alone. Scores
           of attention do not depend on the order, which q and k have in common. Empty: as they lie
    """

    source: str
    first: int
    count: int
    order: tuple[int, ...] = ()

    def part(self, rows: slice | None) -> slice:
        """Rows of the source that are these of the projection; None: all of them."""
        rows = slice(0, self.count) if rows is None else rows
        return slice(self.first + rows.start, self.first + rows.stop)


def fused_rows(config: ModelConfig) -> dict[str, RowsOf]:
    """Name -> rows, within a layer, of the projections that the family keeps in one matrix with
    others; empty for most families."""
    if config.model_type != "phi3":
        return {}
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn = int(config.hf.intermediate_size)
    stacks = {
        "self_attn.qkv_proj.weight": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "mlp.gate_up_proj.weight": {"gate_proj": ffn, "up_proj": ffn},
    }
    order = _head_order(config.head_dim, rotary_dim(config.hf))
    found = {}
    for source, parts in stacks.items():
        first = 0
        for name, count in parts.items():
            turns = order if name in ("q_proj", "k_proj") else ()
            module = source.partition(".")[0]
            found[f"{module}.{name}.weight"] = RowsOf(source, first, count, turns)
            first += count
    return found


def _head_order(head_dim: int, rotary: int) -> tuple[int, ...]:
    """Elements i and i + rotary / 2 of a head come to lie head_dim / 2 apart."""
    if rotary == head_dim:
        return ()
    half, middle = rotary // 2, (head_dim + rotary) // 2
    first = (*range(half), *range(rotary, middle))
    return (*first, *range(half, rotary), *range(middle, head_dim))


class FusedCheckpoint(
    CheckpointView["Checkpoint | BlockCheckpoint | GgufCheckpoint | QuantCheckpoint"]
):
    """The tensors of `files` by the decoder's names. Tensors have their own names, too.

    files  as the family's folders and GGUF files have them
    rows   of fused_rows()
    """

    def __init__(
        self,
        files: Checkpoint | BlockCheckpoint | GgufCheckpoint | QuantCheckpoint,
        rows: Mapping[str, RowsOf],
    ) -> None:
        super().__init__(files)
        self._rows = rows
        self._last: tuple[tuple[str, Any], Any] | None = None

    def __exit__(self, *exc: object) -> None:
        self._last = None
        super().__exit__(*exc)

    def drop_pages(self) -> None:
        """See Checkpoint."""
        self._last = None
        super().drop_pages()

    def rows_of(self, name: str) -> RowsOf | None:
        """Where a projection lies; None for a tensor that lies alone."""
        layer, found = self._split(name)
        if found is None:
            return None
        return dataclasses.replace(found, source=layer + found.source)

    def stored(self, expected: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """`expected` (name -> shape) as the files have it: matrices in the place of their parts."""
        own: dict[str, tuple[int, ...]] = {}
        for name, shape in expected.items():
            found = self.rows_of(name)
            stored = name if found is None else found.source
            above = own[stored][0] if stored in own else 0
            own[stored] = tuple(shape) if found is None else (above + shape[0], *shape[1:])
        return own

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignored: Iterable[str] = (),
        ignored_suffixes: tuple[str, ...] = (),
    ) -> None:
        """It must hold exactly `expected` (name -> shape, the decoder's), besides the ignored
        names."""
        self.files.check(self.stored(expected), ignored=ignored, ignored_suffixes=ignored_suffixes)

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, as floats."""

        def read(source: str, rows: slice | None = None) -> HostArray:
            return self.files.load(source, dtype, rows)

        loaded: HostArray = self._read(read, name, rows, dtype)
        return loaded

    def weight(self, name: str, rows: slice | None = None) -> Any:
        """One tensor, or these rows of it, as it is stored, as the native decoder takes it."""
        return self._read(getattr(self.files, "weight", self.files.load), name, rows, "as stored")

    def _read(
        self, read: Callable[..., Any], name: str, rows: slice | None, form: str | None
    ) -> Any:
        found = self.rows_of(name)
        if found is None:
            return read(name, rows=rows)
        part = found.part(rows)
        if not isinstance(self.files, QuantCheckpoint):
            return _in_order(read(found.source, rows=part), found.order)
        # It unpacks whole matrices alone: once for all projections of one.
        key = (found.source, form)
        if self._last is None or self._last[0] != key:
            self._last = None  # not two of them at once
            self._last = (key, read(found.source))
        whole = self._last[1]
        cut = (whole[0][part], whole[1]) if isinstance(whole, tuple) else row_slice(whole, part)
        return _in_order(cut, found.order)

    def _split(self, name: str) -> tuple[str, RowsOf | None]:
        """(model.layers.<i>., what the rest of the name stands for)."""
        words = name.split(".", 3)
        if len(words) < 4 or words[:2] != ["model", "layers"]:
            return "", None
        return ".".join(words[:3]) + ".", self._rows.get(words[3])


def _in_order(weight: Any, order: tuple[int, ...]) -> Any:
    """Rows of whole heads, floats or (blocks, format), each head's in this order."""
    if not order:
        return weight
    if isinstance(weight, tuple):
        return _in_order(weight[0], order), weight[1]
    heads = np.arange(0, weight.shape[0], len(order))
    return take_rows(weight, (heads[:, None] + np.array(order)).reshape(-1))
