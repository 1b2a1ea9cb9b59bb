"""ReDrafter's network on the target's device; the beams themselves are kept on the host.

A depth of the search is a pass of the layers and the choice of each row's best scores on the
device, one copy of these to the host, and one copy of the rows that continue back to the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import _core
from ...models.device_step import Upload
from ...models.host_rows import HostRows
from .layers import RedrafterLayers
from .model import Redrafter

__all__ = ["DeviceRedrafter", "SearchCost"]


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
        self._layers = RedrafterLayers(network, target)
        self.device: torch.device = self._layers.device
        self.num_scores = self._layers.num_scores
        self.token_ids = network.token_ids  # of the search, which is on the host
        self._memory = self._rows = self._layers.make_rows(0)
        self._tokens = torch.zeros(0, dtype=torch.int32, device=self.device)  # [R]
        self._upload = Upload(self.device)
        self._best = HostRows(self.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of its own; a head that is the target's is not counted."""
        return self._layers.weight_bytes

    def scratch_bytes(self, max_rows: int) -> int:
        """Device memory of a pass besides the weights: its rows, and choosing from the scores."""
        return self._layers.row_bytes * max_rows + self._layers.choice_bytes(max_rows)

    def start(self, hidden: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        """One request a row: its hidden state [H], on the device, and last token."""
        self._take(len(hidden))
        self._rows.context.copy_(torch.stack(list(hidden)))
        self._rows.old_state.zero_()
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
        return self._layers.run(self._rows, self._tokens)

    def _take(self, rows: int) -> None:
        """So many rows, contents arbitrary; the memory is only ever grown."""
        if len(self._memory) < rows:
            self._memory = self._layers.make_rows(rows)
        self._rows = self._memory.first(rows)

    def _gather(self, search: Any) -> None:
        """The rows of the next depth: each takes over what the row that it extends had."""
        parents, tokens = self._upload.send([search.row_parents, search.row_tokens])
        context = self._rows.context.index_select(0, parents)
        state = self._rows.state.index_select(0, parents)
        self._take(len(parents))
        self._rows.context.copy_(context)
        self._rows.old_state.copy_(state)
        self._tokens = tokens

    def _best_scores(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores float32, columns int32) [R, k] of each row, on the host: one copy for both."""
        kept = min(_core.BEAM_SCORES, self.num_scores)
        values, columns = torch.topk(scores, kept)
        # What is no number is the greatest to topk, so a row that has one shows it.
        both = torch.stack((values.float().view(torch.int32), columns.to(torch.int32)))
        best, where = self._best.fetch(both)
        return best.view(torch.float32), where
