"""ReDrafter's network on few-row linear layers.

The state of a request is nothing but its last hidden state and token: a step starts the recurrence
afresh, so a request that ends leaves nothing behind.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ... import _core
from ...errors import ModelError
from ...models.host_arrays import as_torch, converted
from ...models.native import NativeModel
from ..packed_layer import drafter_format, pack_layer
from .checkpoint import RedrafterShape, RedrafterWeights

__all__ = ["PackedRedrafter", "check_target"]


class PackedRedrafter:
    """The network beside a native target as _core.RecurrentDrafter (`core`), packed for few
    rows."""

    def __init__(self, weights: RedrafterWeights, target: NativeModel) -> None:
        shape = weights.shape
        self.shape = shape
        self.num_scores = shape.draft_vocab_size or shape.vocab_size
        self.token_ids = weights.token_ids
        dtype, format = target.kv_dtype_name, drafter_format(target)

        def pack(name: str) -> Any:
            weight, bias = weights.linear(name)
            return pack_layer([weight], bias, dtype, format)

        recurrence = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            state, bias = weights.linear("rnn_u")
            parts = [converted(part, "float32") for part in (weights.linear("rnn_w")[0], state)]
            joined = np.concatenate(cast(Any, parts), axis=1)
            recurrence = pack_layer([joined], bias, dtype, format)
        projection = pack("input_proj") if shape.has_input_proj else None
        blocks = [pack(f"lm_head.{i}.linear") for i in range(shape.num_draft_layers)]
        head = None
        if not shape.tie_lm_head:
            head = pack(f"lm_head.{shape.num_draft_layers}")
        elif self.token_ids is not None:
            head = pack_layer([target.head_rows(self.token_ids)], None, dtype, format)
        layers = [recurrence, projection, *blocks, head]
        # The bytes of its own packed weights; a head that is the target's is not counted.
        self.weight_bytes = sum(int(layer.weight_bytes) for layer in layers if layer is not None)
        self.core = _core.RecurrentDrafter(
            hidden_size=shape.hidden_size,
            num_scores=self.num_scores,
            recurrence=recurrence,
            projection=projection,
            blocks=blocks,
            target=target.core,
            head=head,
        )


def check_target(shape: RedrafterShape, target: Any) -> None:
    """Raise ModelError when the drafter was made for a target of other sizes."""
    for name, ours, theirs in (
        ("hidden_size", shape.hidden_size, target.hidden_size),
        ("vocab_size", shape.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ModelError(
                f"redrafter: the drafter was trained for {name} = {ours}, the target has "
                f"{theirs}; give the drafter of this target"
            )
    first: Any = np.zeros(1, dtype=np.int32)
    first = first if isinstance(target, NativeModel) else as_torch(first)
    if target.embed(first).shape[1] != shape.hidden_size:
        raise ModelError(
            "redrafter: the target's input embeddings are not of its hidden_size = "
            f"{shape.hidden_size}; this drafter adds the two"
        )
