"""Medusa heads from their files to where the target runs, and the rates to start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...config.medusa import MedusaDecodingConfig
from ...config.medusa_choices import MAX_TOP_K
from ...log import logger
from ...models.host_arrays import kv_dtype_name
from ...models.place import CPU
from ..packed_layer import drafter_format
from .checkpoint import read_heads
from .packed_heads import PackedHeads

if TYPE_CHECKING:
    from .device_heads import DeviceHeads

__all__ = ["Rates", "open_heads"]

Rates = np.ndarray[Any, np.dtype[np.float64]]  # [heads, ranks]

# Rates that a new engine starts from where the heads bring none: right often enough to be tried.
_FIRST_RATE, _RANK_DECAY, _HEAD_DECAY = 0.5, 0.4, 0.85


def open_heads(
    config: MedusaDecodingConfig, model: Any, *, allow_pickle: bool = False
) -> tuple[MedusaDecodingConfig, PackedHeads | DeviceHeads, Rates]:
    """`config` with the heads that its file really has, they where `model` runs, and the rates
    [heads, MAX_TOP_K] of their guesses to start from.

    Raises ConfigError or ModelError when file, configuration and model do not fit.
    """
    heads = read_heads(config.model, model=model, allow_pickle=allow_pickle)
    known = config.with_heads(heads.config.num_medusa_heads, heads.config.head_rows)
    number = known.num_medusa_heads
    assert number is not None
    dtype = str(kv_dtype_name(model)) if config.dtype == "auto" else config.dtype
    prior = _prior(heads.config.training, number, MAX_TOP_K)
    if getattr(model, "place", CPU).is_cpu:
        format = drafter_format(model) if config.dtype == "auto" else None
        packed = PackedHeads(heads, model, num_heads=number, dtype=dtype, format=format)
        return known, packed, prior
    import torch

    from .device_heads import DeviceHeads
    from .heads import MedusaHeads

    module = MedusaHeads.of_weights(heads)
    kind = getattr(torch, dtype)
    return known, DeviceHeads(module, model, num_heads=number, dtype=kind), prior


def _prior(training: Mapping[str, Any], num_heads: int, top_k: int) -> Rates:
    """Rates to start from: those that the trainer has measured, else a cautious guess."""
    decay = _RANK_DECAY ** np.arange(top_k)
    prior = np.array([_FIRST_RATE * _HEAD_DECAY**h * decay for h in range(num_heads)])
    measured = training.get("guess_rates")
    try:
        for head, row in enumerate((measured or [])[:num_heads]):
            values = np.clip(np.array(row[:top_k], dtype=np.float64), 0.0, 1.0)
            prior[head, : len(values)] = values
            prior[head, len(values) :] = 0.0
    except (TypeError, ValueError):
        logger.warning("the heads' config.json has unusable training.guess_rates; ignored")
    return prior
