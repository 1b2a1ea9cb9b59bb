"""ReDrafter's network on the target's device; the beams themselves are kept on the host.

A depth of the search is a pass of the layers and the choice of each row's best scores on the
device, one copy of these to the host, and one copy of the rows that go on back to the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..models.device_step import Upload
from ..models.host_rows import HostRows
from .redrafter_model import Redrafter

__all__ = ["DeviceRedrafter", "SearchCost"]

_KEPT = 50  # scores of a row that the search looks at (BeamSearch::kKept)


@dataclass
class SearchCost:
    """What a search took; as _core.SearchCost."""

    passes: int = 0
    rows: int = 0
    seconds: float = 0.0
    network_seconds: float = 0.0
    network_thread_seconds: float = 0.0


class DeviceRedrafter:
    """PackedRedrafter's verbs on a device; activations are of the target's dtype there.

    H hidden_size, V' scored tokens, R rows.
    """

    def __init__(self, network: Redrafter, target: Any) -> None:
        shape, device = network.shape, target.place.device
        self.device: torch.device = device
        self.num_scores = shape.draft_vocab_size or shape.vocab_size
        self.token_ids = network.token_ids  # of the search, which is on the host
        self._target = target
        self._dtype: torch.dtype = target.kv_dtype

        def there(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
            bias = linear.bias
            return (
                linear.weight.to(device, self._dtype),
                None if bias is None else bias.to(device, self._dtype),
            )

        self._recurrence: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            both = torch.cat((network.rnn_w.weight, network.rnn_u.weight), dim=1)
            bias = network.rnn_u.bias.to(device, self._dtype)
            self._recurrence = (both.to(device, self._dtype), bias)
        self._projection = there(network.input_proj) if shape.has_input_proj else None
        self._blocks = [there(block.linear) for block in network.blocks()]
        self._head: torch.Tensor | None = None
        if not shape.tie_lm_head:
            self._head = network.own_head().weight.to(device, self._dtype)
        elif self.token_ids is not None:
            self._head = target.head_rows(self.token_ids.to(device)).to(self._dtype)
        else:
            target.head(torch.zeros(1, shape.hidden_size, device=device))  # refused here
        empty = torch.zeros(0, shape.hidden_size, dtype=self._dtype, device=device)
        self._context = self._state = empty  # [R, H]
        self._tokens = torch.zeros(0, dtype=torch.int32, device=device)  # [R]
        self._upload = Upload(device)
        self._best = HostRows(device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of its own; a head that is the target's is not counted."""
        layers = [self._recurrence, self._projection, *self._blocks, (self._head, None)]
        tensors = [t for layer in layers if layer is not None for t in layer if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def scratch_bytes(self, max_rows: int) -> int:
        """Device memory that a pass may take for a while: the scores, and choosing from them."""
        size = 4 if self._head is None else self._dtype.itemsize
        return 2 * max_rows * self.num_scores * size

    def start(self, hidden: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        """One request a row: its hidden state [H], on the device, and last token."""
        self._context = torch.stack(list(hidden)).to(self._dtype)
        self._state = torch.zeros_like(self._context)
        (self._tokens,) = self._upload.send([np.array(tokens, dtype=np.int32)])

    def run(self, search: Any, gains: Sequence[float], pass_seconds: float) -> SearchCost:
        """See PackedRedrafter.run()."""
        cost = SearchCost()
        begin = passed = time.perf_counter()
        while search.num_rows:
            processor = time.thread_time()
            if cost.passes:
                self._gather(search)
            best, columns = self._best_scores(self.scores())
            cost.network_seconds += time.perf_counter() - passed
            cost.network_thread_seconds += time.thread_time() - processor
            cost.passes += 1
            cost.rows += len(best)
            search.advance_best(best, columns, self.num_scores, self.token_ids)
            passed = time.perf_counter()
            cost.seconds = passed - begin
            pass_seconds = pass_seconds or cost.seconds
            if cost.passes <= len(gains):
                expected = float(np.exp(search.row_log_probs).sum())
                if expected * gains[cost.passes - 1] < pass_seconds:
                    break
        return cost

    def scores(self) -> torch.Tensor:
        """Scores [R, V'] of the rows, on the device; their states take in their tokens."""
        embedding = self._target.embed(self._tokens).to(self._dtype)
        if self._recurrence is None:
            self._state = self._state + embedding
        else:
            pair = torch.cat((embedding, self._state), dim=1)
            self._state = nn.functional.silu(nn.functional.linear(pair, *self._recurrence))
        x = torch.cat((self._context, self._state), dim=1)
        if self._projection is not None:
            x = nn.functional.linear(x, *self._projection)
        for weight, bias in self._blocks:
            x = x + nn.functional.silu(nn.functional.linear(x, weight, bias))
        if self._head is None:
            result: torch.Tensor = self._target.head(x.float())
            return result
        return nn.functional.linear(x, self._head)

    def _gather(self, search: Any) -> None:
        """The rows of the next depth: each takes over what the row that it extends had."""
        parents, tokens = self._upload.send([search.row_parents, search.row_tokens])
        self._context = self._context.index_select(0, parents)
        self._state = self._state.index_select(0, parents)
        self._tokens = tokens

    def _best_scores(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores float32, columns int32) [R, k] of each row, on the host: one copy for both."""
        kept = min(_KEPT, self.num_scores)
        values, columns = torch.topk(scores, kept)
        # What is no number is the greatest to topk, so a row that has one shows it.
        both = torch.stack((values.float().view(torch.int32), columns.to(torch.int32)))
        best, where = self._best.fetch(both)
        return best.view(torch.float32), where
