"""ReDrafter's network on few-row linear layers.

The state of a request is nothing but its last hidden state and token: a step starts the recurrence
afresh, so a request that ends leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import _core
from ...errors import ModelError
from ...models.native import NativeModel
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
        self.token_ids = network.token_ids
        dtype = target.kv_dtype

        def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return _core.PackedLinear(
                weight.to(dtype).contiguous(), None if bias is None else bias.contiguous()
            )

        self._recurrence = self._input_proj = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            both = torch.cat((network.rnn_w.weight, network.rnn_u.weight), dim=1)
            self._recurrence = pack(both, network.rnn_u.bias)
        if shape.has_input_proj:
            self._input_proj = pack(network.input_proj.weight, network.input_proj.bias)
        blocks = network.blocks()
        self._blocks = [pack(block.linear.weight, block.linear.bias) for block in blocks]
        if not shape.tie_lm_head:
            self._head = pack(network.own_head().weight, None)
        elif self.token_ids is not None:
            self._head = pack(target.head_rows(self.token_ids), None)
        else:
            self._head = None
            target.head(torch.zeros(1, shape.hidden_size))  # refused here, not in a step

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

    def start(self, hidden: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
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
    if target.embed(torch.zeros(1, dtype=torch.int32)).shape[1] != shape.hidden_size:
        raise ModelError(
            "redrafter: the target's input embeddings are not of its hidden_size = "
            f"{shape.hidden_size}; this drafter adds the two"
        )
