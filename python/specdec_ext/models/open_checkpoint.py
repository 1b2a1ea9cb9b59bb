"""The tensors of a model, whatever its files are."""

from __future__ import annotations

from .block_checkpoint import BlockCheckpoint
from .config_reader import ModelConfig
from .gguf_weights import GgufCheckpoint
from .quant_checkpoint import QuantCheckpoint
from .weights import Checkpoint

__all__ = ["open_checkpoint"]


def open_checkpoint(
    config: ModelConfig, *, allow_pickle: bool = False
) -> Checkpoint | BlockCheckpoint | GgufCheckpoint:
    """The tensors of a model, under transformers' names. Raises ModelError."""
    if config.is_gguf:
        return GgufCheckpoint(config.path)
    if config.quant is not None:
        return QuantCheckpoint(config.path, config.quant, config.dtype)
    if config.blocks:
        return BlockCheckpoint(config.path, config.blocks)
    return Checkpoint(config.path, allow_pickle=allow_pickle)
