"""Medusa heads packed for decoding: few rows at a time, the weights streamed once per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import _core
from ...models.host_arrays import HostArray, as_torch, from_torch, stacked
from ...models.native import NativeModel
from ..packed_layer import pack_layer
from .weights import HeadWeights

__all__ = ["PackedHeads"]


class PackedHeads:
    """The heads as _core.MedusaHeads (`core`).

    num_heads  the first so many of `heads` are kept
    dtype      of the layers, if they stay floats
    format     of the layers in blocks (drafter_format()); None: they stay floats
    model      a StepModel on the CPU: gives the LM head where the heads share the target's. The
               native decoder's own is used as it is, that of any other model is copied
    """

    def __init__(
        self,
        heads: HeadWeights,
        model: Any,
        *,
        num_heads: int,
        dtype: str,
        format: str | None = None,
    ) -> None:
        config = heads.config
        self.num_heads = num_heads
        self.num_scores = config.head_rows
        self.token_ids = heads.token_ids

        def pack(layers: Sequence[tuple[HostArray, HostArray | None]]) -> Any:
            """One layer of several, stacked along the outputs."""
            biases = [bias for _, bias in layers if bias is not None]
            bias = stacked(biases, "float32") if biases else None
            return pack_layer([weight for weight, _ in layers], bias, dtype, format)

        kept, layers = range(num_heads), config.num_medusa_layers
        # The first blocks of all heads read the same rows: one layer, stacked.
        first = pack([heads.block(head, 0) for head in kept]) if layers else None
        deeper = [[pack([heads.block(head, i)]) for i in range(1, layers)] for head in kept]
        lm_heads = [pack([(weight, None)]) for weight in heads.lm_heads()[:num_heads]]
        target = None
        if config.lm_head == "target":
            if isinstance(model, NativeModel) and heads.token_ids is None:
                target = model.core
            else:
                ids = heads.token_ids
                every = np.arange(config.vocab_size, dtype=np.int32)
                rows = _target_rows(model, every if ids is None else ids)
                lm_heads = [pack_layer([rows], None, dtype, format)]
        packed = [*([] if first is None else [first]), *lm_heads]
        packed += [layer for head in deeper for layer in head]
        # The bytes of the packed weights, without a head that is the target's.
        self.weight_bytes = sum(int(layer.weight_bytes) for layer in packed)
        self.core = _core.MedusaHeads(
            hidden_size=config.hidden_size,
            num_heads=num_heads,
            num_scores=self.num_scores,
            first=first,
            deeper=deeper,
            lm_heads=lm_heads,
            target=target,
            token_ids=heads.token_ids,
        )


def _target_rows(model: Any, token_ids: np.ndarray) -> HostArray:
    """float32 [n, hidden_size]: rows of the target's output head."""
    if isinstance(model, NativeModel):
        rows: HostArray = model.head_rows(token_ids)
        return rows
    return from_torch(model.head_rows(as_torch(token_ids)))
