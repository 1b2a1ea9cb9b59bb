"""The tensors of a model, whatever its files are."""

from __future__ import annotations

from .block_checkpoint import BlockCheckpoint
from .config_reader import ModelConfig
from .fused_rows import FusedCheckpoint, fused_rows
from .gguf_weights import GgufCheckpoint
from .quant_checkpoint import QuantCheckpoint
from .rank_checkpoint import RankCheckpoint, check_ranks, read_ranks
from .shard import Shard
from .weights import Checkpoint

__all__ = ["open_checkpoint"]


def open_checkpoint(
    config: ModelConfig, *, allow_pickle: bool = False, shard: Shard | None = None
) -> Checkpoint | BlockCheckpoint | GgufCheckpoint | RankCheckpoint | FusedCheckpoint:
    """The tensors of a model, under transformers' names; projections that a family keeps in one
    matrix under names of their own, too.

    shard  whose rows will be asked for. Raises ModelError, and ConfigError for a model that was
           converted for another number of ranks.
    """
    if not config.is_gguf:
        check_ranks(config.path, 1 if shard is None else shard.size)
        if shard is not None and read_ranks(config.path) > 1:
            tied = config.tie_word_embeddings
            return RankCheckpoint(config.path, shard, config.blocks, tied=tied)
    files = _open_files(config, allow_pickle)
    rows = fused_rows(config)
    return FusedCheckpoint(files, rows) if rows else files


def _open_files(
    config: ModelConfig, allow_pickle: bool
) -> Checkpoint | BlockCheckpoint | GgufCheckpoint:
    if config.is_gguf:
        return GgufCheckpoint(config.path)
    if config.quant is not None:
        return QuantCheckpoint(config.path, config.quant, config.dtype)
    if config.blocks:
        return BlockCheckpoint(config.path, config.blocks)
    return Checkpoint(config.path, allow_pickle=allow_pickle)
