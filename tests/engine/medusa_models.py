"""Tiny random targets and random Medusa heads for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec_ext.drafters.medusa.heads import (
    MedusaHeads,
    MedusaHeadsConfig,
    save_medusa_heads,
)
from tiny_models import save_llama

VOCAB = 48


def save_target(folder: Path, *, seed: int = 11, **overrides: Any) -> Path:
    """The target of the Medusa tests."""
    return save_llama(folder, seed, VOCAB, **overrides)


def make_heads(
    *,
    hidden: int = 32,
    vocab: int = VOCAB,
    number: int = 4,
    layers: int = 1,
    lm_head: str = "own",
    ids: list[int] | None = None,
    seed: int = 0,
    scale: float = 1.0,
) -> MedusaHeads:
    config = MedusaHeadsConfig(
        hidden, vocab, number, num_medusa_layers=layers, lm_head=lm_head,
        draft_vocab_size=None if ids is None else len(ids),
    )  # fmt: skip
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return heads.requires_grad_(False)


def save_heads(folder: Path, **options: Any) -> Path:
    return save_medusa_heads(folder, make_heads(**options), dtype="float32")
