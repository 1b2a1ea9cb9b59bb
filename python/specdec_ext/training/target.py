"""What the trainers take of the target besides its texts: rows of its head, its embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models import load_model
from ..models.config_reader import ModelConfig
from ..models.drafter_files import EMBEDDING, HEAD
from ..models.host_arrays import as_torch
from ..models.native_config import NotNativeError, native_shape
from ..models.open_checkpoint import open_checkpoint

__all__ = ["TargetRows", "read_target"]


@dataclass(frozen=True)
class TargetRows:
    """head       float32 [n, hidden_size], the head's rows of some tokens
    embedding  float32 [V, hidden_size], as stored; None: it was not asked for
    softcap    of the target's scores, 0 for none
    """

    head: torch.Tensor
    embedding: torch.Tensor | None
    softcap: float


def read_target(config: ModelConfig, token_ids: torch.Tensor, *, embeds: bool) -> TargetRows:
    """Read them from the checkpoint, without loading the model where it is of a native family.

    Raises UnsupportedModelError when the head of another model cannot be used on its own.
    """
    try:
        shape = native_shape(config)
    except NotNativeError:
        model = load_model(config.path, max_rows=16, max_seq_len=32)
        every = torch.arange(model.vocab_size, dtype=torch.int32)
        return TargetRows(model.head_rows(token_ids), model.embed(every) if embeds else None, 0.0)
    ids = token_ids.to(torch.int64)
    with open_checkpoint(config) as checkpoint:
        name = EMBEDDING if shape.tie_word_embeddings else HEAD
        table = as_torch(checkpoint.load(name, "float32"))
        head = table[ids]
        embedding = None
        if embeds:
            table = table if name == EMBEDDING else as_torch(checkpoint.load(EMBEDDING, "float32"))
            embedding = table.clone()
    return TargetRows(head, embedding, shape.final_softcap)
