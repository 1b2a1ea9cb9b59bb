"""A draft model on a device, trees: everything that a step launches follows from its sizes.

The first pass reads the end of each text; each further one the golden token and the nodes that
were opened so far (``ops.pack_drafts``), which writes over K/V of the pass before. So the next step
reads as much of a text's end as a step can have added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from .device_forward import ChainRows
from .device_side import DeviceSide

if TYPE_CHECKING:
    from torch import Tensor

    from ...config.grown_tree import GrownTreeConfig
    from ...models.place import Place
    from ..slot_drafter import DraftInputs
    from ..vocabulary import VocabularyMap
    from .device_apart import OwnDevice
    from .device_side import MakeForward
    from .draft_sizes import DraftSizes, TextReads

__all__ = ["DeviceTrees"]


class DeviceTrees(DeviceSide):
    """Trees, whose nodes are the likeliest ones for every request; see DeviceSide."""

    def __init__(
        self,
        config: GrownTreeConfig,
        vocabulary: VocabularyMap,
        place: Place,
        sizes: DraftSizes,
        reads: TextReads,
        make_forward: MakeForward,
        own_device: OwnDevice | None = None,
    ) -> None:
        max_requests = sizes.max_requests
        self._depth = config.max_draft_path_len
        self._width = width = min(config.top_k, vocabulary.num_scores)
        rows = max(sizes.max_rows, max_requests * (1 + width * max(self._depth - 1, 0)))
        scores = max_requests * (width if self._depth > 1 else 1)
        sizes = sizes._replace(max_rows=rows)
        super().__init__(
            config, vocabulary, place, sizes, reads, make_forward, own_device, max_scores=scores
        )
        self._growths = ops.make_growths(max_requests, place.device)
        # Rows of a pass after the first.
        self._tokens, self._parents, self._positions = torch.zeros(3, rows, **self._ints)
        self._sources = torch.zeros(rows, **self._ints)
        self._mask = torch.zeros(rows, 4, **self._ints)
        self._is_tree = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._logit_rows = torch.zeros(max_requests, width, **self._ints)
        # The golden token's row in the pass before, by request.
        self._golden_rows = torch.zeros(max_requests, **self._ints)
        self._row = torch.arange(rows, **self._ints)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter. A tree is the same whatever the request asks."""

    def _make(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, *, wants_survival: bool
    ) -> list[Tensor]:
        del wants_survival  # they are there
        requests = inputs.num_requests
        levels = min(self._depth, inputs.max_width)
        first, result = self._read_texts(inputs, last, lens, inputs.max_width, needs_scores=True)
        # Nodes of the last level lie so far after the text.
        fits = (lens + (levels - 1) <= self._max_len) & (first.limit > 0)
        has_pages = inputs.page_table.amax(1) < self._num_pages
        limits = inputs.max_drafts * (fits & has_pages)
        places = first.places.clamp_max(requests - 1)
        self._grow(result.index_select(0, places), limits, 0, levels)
        golden = last[:, -1].contiguous()
        if self.forward.takes_sources:
            self._golden_rows[:requests].copy_(first.logit_rows.index_select(0, places))
        for level in range(1, levels):
            self._grow(self._follow(inputs, golden, lens, level), limits, level, levels)
        return [self._growths[:requests]]

    def _propose(self, inputs: DraftInputs, made: Sequence[Tensor]) -> None:
        ops.propose_growths(
            inputs.layout, inputs.slots, inputs.slot_ids, made[0], backend=self._home.backend
        )

    def _follow(self, inputs: DraftInputs, golden: Tensor, lens: Tensor, level: int) -> Tensor:
        """One pass: the golden tokens [D] and all opened nodes. Scores [D * width, V] after those
        of the newest level."""
        requests, backend = inputs.num_requests, self._place.backend
        most = 1 + self._width * level  # rows of a request
        rows = requests * most
        cu_rows, is_tree = self._cu_rows[: requests + 1], self._is_tree[:requests]
        logit_rows = self._logit_rows[:requests]
        sources = self._sources[:rows] if self.forward.takes_sources else None
        ops.pack_drafts(
            self._growths[:requests],
            golden,
            tokens=self._tokens[:rows],
            parents=self._parents[:rows],
            cu_rows=cu_rows,
            logit_rows=logit_rows,
            sources=sources,
            backend=backend,
        )
        kv_len = (lens - 1).clamp_min(0)
        ops.build_step(
            self._parents[:rows],
            inputs.page_table,
            kv_len,
            cu_rows,
            positions=self._positions[:rows],
            mask=self._mask[:rows],
            is_tree=is_tree,
            page_size=self._page_size,
            num_pages=self._num_pages,
            max_rows=most,
            backend=backend,
        )
        if sources is not None:
            sources = self._follows(cu_rows, sources)
        chain = ChainRows(
            self._tokens[:rows], self._positions[:rows], cu_rows, kv_len, most,
            self._mask[:rows], is_tree,
        )  # fmt: skip
        return self._read(
            chain,
            inputs.page_table,
            logit_rows.view(-1),
            needs_scores=True,
            max_kv_len=inputs.max_kv_len,
            sources=sources,
        )

    def _follows(self, cu_rows: Tensor, sources: Tensor) -> Tensor:
        """sources [R] of ops.pack_drafts, counted over all rows of the pass before."""
        request = torch.searchsorted(cu_rows[1:], self._row[: len(sources)], right=True)
        request.clamp_max_(len(cu_rows) - 2)  # of padding any
        golden = self._golden_rows[: len(cu_rows) - 1]
        found: Tensor = golden.index_select(0, request) + sources
        golden.copy_(cu_rows[:-1])
        return found.masked_fill_(sources < 0, -1)

    def _grow(self, scores: Tensor, limits: Tensor, level: int, levels: int) -> None:
        """A level from the scores [D * places, V] of the rows that were new."""
        requests = len(limits)
        scores = scores[:, : self._num_columns]
        best, columns = torch.topk(scores, self._width)
        shares = (best - scores.logsumexp(1, keepdim=True)).exp()
        shape = (requests, -1, self._width)
        ops.grow_drafts(
            self._growths[:requests],
            shares.view(shape),
            columns.view(shape),
            limits,
            num_columns=self._num_columns,
            max_open=self._width if level + 1 < levels else 0,
            begins=level == 0,
            token_ids=self._output_ids,
            backend=self._place.backend,
        )
