"""ReDrafter's network on few-row linear layers.

The state of a request is nothing but its last hidden state and token: a step starts the recurrence
afresh, so a request that ends leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core
from ...errors import ModelError
from ...models.host_arrays import as_torch, converted, from_torch
from ...models.native import NativeModel

if TYPE_CHECKING:
    import torch

    from .model import Redrafter, RedrafterShape

__all__ = ["PackedRedrafter", "check_target"]


class PackedRedrafter:
    """The network beside a native target, packed for few rows in the target's dtype.

    H hidden_size, V' scored tokens, R rows; tensors are float32.
    """

    def __init__(self, network: Redrafter, target: NativeModel) -> None:
        shape = network.shape
        self.shape = shape
        self.num_scores = shape.draft_vocab_size or shape.vocab_size
        ids = network.token_ids
        self.token_ids = None if ids is None else from_torch(ids)
        dtype = target.kv_dtype_name

        def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return _pack(from_torch(weight), None if bias is None else from_torch(bias), dtype)

        self._recurrence = self._input_proj = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            parts = (network.rnn_w.weight, network.rnn_u.weight)
            both = np.concatenate([from_torch(part) for part in parts], axis=1)
            self._recurrence = _pack(both, from_torch(network.rnn_u.bias), dtype)
        if shape.has_input_proj:
            self._input_proj = pack(network.input_proj.weight, network.input_proj.bias)
        blocks = network.blocks()
        self._blocks = [pack(block.linear.weight, block.linear.bias) for block in blocks]
        if not shape.tie_lm_head:
            self._head = pack(network.own_head().weight, None)
        elif self.token_ids is not None:
            self._head = _pack(target.head_rows(self.token_ids), None, dtype)
        else:
            self._head = None
            # Refused here, not in a step.
            target.head(np.zeros((1, shape.hidden_size), dtype=np.float32))

        self._network = _core.RecurrentDrafter(
            hidden_size=shape.hidden_size,
            num_scores=self.num_scores,
            recurrence=self._recurrence,
            projection=self._input_proj,
            blocks=self._blocks,
            target=target.core,
            head=self._head,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights of its own; a head that is the target's is not counted."""
        layers = [self._recurrence, self._input_proj, *self._blocks, self._head]
        return sum(int(layer.weight_bytes) for layer in layers if layer is not None)

    def start(self, hidden: Sequence[Any], tokens: Sequence[int]) -> None:
        """One request a row: its hidden state [H] and last token."""
        self._network.start(hidden, tokens)

    def run(self, search: Any, max_length: int = 0, pass_price: float = 0.0) -> Any:
        """After start(): the search, to its end or until going on does not pay.

        max_length  of any beam; needed with a price
        pass_price  tokens that a pass after the first has to bring; 0: passes are free

        Returns a _core.SearchCost.
        """
        gains = [1.0] * (max_length - 1) if pass_price > 0 else []
        return self._network.run(search, self.token_ids, gains, pass_price)

    def score(self, search: Any) -> None:
        """Run the layers for the rows of a _core.BeamSearch: one depth of what run() does."""
        self._network.score(search)

    def advance(self, search: Any) -> None:
        """The next depth of the search, from these scores."""
        self._network.advance(search, self.token_ids)

    @property
    def scores(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A copy of the last scores, [R, V']."""
        return self._network.scores


def _pack(weight: Any, bias: Any, dtype: str) -> Any:
    return _core.PackedLinear(converted(weight, dtype), bias)


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
