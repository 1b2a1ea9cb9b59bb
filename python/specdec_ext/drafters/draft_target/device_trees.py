"""A draft model on a device, trees: everything that a step launches follows from its sizes.

The first pass reads the end of each text; each further one the golden token and the nodes that
were opened so far (``ops.pack_drafts``), which writes over K/V of the pass before. So the next step
reads as much of a text's end as a step can have added.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from .device_forward import ChainRows, DraftForward
from .device_rows import DeviceReader, PromptPacker
from .rows_read import rows_read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...config.methods import DraftTargetDecodingConfig
    from ...models import StepModel
    from ...models.place import Place
    from ..slot_drafter import DraftInputs, PromptInputs
    from ..vocabulary import VocabularyMap

__all__ = ["DeviceTrees"]


class DeviceTrees:
    """HostPasses' verbs on a device.

    place         of both models
    vocab_size    of the target
    max_requests  slots of the engine
    max_rows      of a step of the engine, and of one pass of the draft model
    """

    def __init__(
        self,
        config: DraftTargetDecodingConfig,
        model: StepModel,
        vocabulary: VocabularyMap,
        place: Place,
        *,
        vocab_size: int,
        max_requests: int,
        max_rows: int,
    ) -> None:
        del vocab_size  # the tokens of columns are the target's
        self._place = place
        self._max_len, self._depth = model.max_position, config.max_draft_path_len
        self._width = min(config.top_k, vocabulary.num_scores)
        self._num_columns = vocabulary.num_scores
        self._num_pages, self._page_size = 0, 1  # of the draft model
        reads = rows_read(config)
        sizes = {"max_requests": max_requests, "max_len": self._max_len}
        self._prompts = PromptPacker(place, max_rows=max_rows, **sizes)
        self._reader = DeviceReader(place, rows=reads, **sizes)
        rows = max(max_rows, max_requests * (1 + self._width * max(self._depth - 1, 0)))
        self.forward = DraftForward(
            model,
            place,
            max_rows=rows,
            max_requests=max_requests,
            max_scores=max_requests * (self._width if self._depth > 1 else 1),
        )
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._last = torch.zeros(max_requests, reads, **how)
        self._lens = torch.zeros(max_requests, **how)
        self._growths = ops.make_growths(max_requests, place.device)
        # Rows of a pass behind the first.
        self._tokens, self._parents, self._positions = (torch.zeros(rows, **how) for _ in range(3))
        self._mask = torch.zeros(rows, 4, **how)
        self._is_tree = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._cu_rows = torch.zeros(max_requests + 1, **how)
        self._logit_rows = torch.zeros(max_requests, self._width, **how)
        self._input_ids, self._output_ids = (
            torch.tensor(ids, **how) if ids else None
            for ids in (vocabulary.input_ids, vocabulary.output_ids)
        )

    @property
    def num_passes(self) -> int:
        return self.forward.num_passes

    @property
    def num_rows(self) -> int:
        return self.forward.num_rows

    @property
    def memory_bytes(self) -> int:
        kept = sum(t.numel() * t.element_size() for t in vars(self).values() if torch.is_tensor(t))
        return self.forward.memory_bytes + kept

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The draft model's pages [layers, P, G, S, K]."""
        self.forward.model.bind_cache(k_pages, v_pages)
        self._num_pages, self._page_size = k_pages.shape[1], k_pages.shape[3]

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """Every request's nodes are the likeliest ones."""

    def draft_probs(self, num_requests: int) -> None:
        """Nothing is drawn."""

    @torch.inference_mode()
    def read_prompts(self, prompts: PromptInputs) -> None:
        self._read(
            self._prompts.pack(prompts),
            prompts.page_table,
            self._cu_rows[:1],  # what the pass gives is dropped: any row
            needs_scores=False,
            max_kv_len=prompts.max_kv_len,
        )

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, *, wants_survival: bool) -> None:
        del wants_survival  # they are there
        requests, backend = inputs.num_requests, self._place.backend
        levels = min(self._depth, inputs.max_width)
        last, lens = self._last[:requests], self._lens[:requests]
        ops.recent_tokens(
            inputs.layout, inputs.slots, inputs.slot_ids, tokens=last, lens=lens, backend=backend
        )
        first = self._reader.first(inputs, last, lens, inputs.max_width)
        result = self._read(
            first.rows,
            inputs.page_table,
            first.logit_rows,
            needs_scores=True,
            max_kv_len=inputs.max_kv_len,
        )
        # Nodes of the last level lie so far behind the text.
        fits = (lens + (levels - 1) <= self._max_len) & (lens > 0)
        has_pages = inputs.page_table.amax(1) < self._num_pages
        limits = inputs.max_drafts * (fits & has_pages)
        places = first.places.clamp_max(requests - 1)
        self._grow(result.index_select(0, places), limits, 0, levels)
        golden = last[:, -1].contiguous()
        for level in range(1, levels):
            self._grow(self._follow(inputs, golden, lens, level), limits, level, levels)
        growths = self._growths[:requests]
        ops.propose_growths(inputs.layout, inputs.slots, inputs.slot_ids, growths, backend=backend)

    def _follow(self, inputs: DraftInputs, golden: Tensor, lens: Tensor, level: int) -> Tensor:
        """One pass: the golden tokens [D] and all opened nodes. Scores [D * width, V] behind those
        of the newest level."""
        requests, backend = inputs.num_requests, self._place.backend
        most = 1 + self._width * level  # rows of a request
        rows = requests * most
        cu_rows, is_tree = self._cu_rows[: requests + 1], self._is_tree[:requests]
        logit_rows = self._logit_rows[:requests]
        ops.pack_drafts(
            self._growths[:requests],
            golden,
            tokens=self._tokens[:rows],
            parents=self._parents[:rows],
            cu_rows=cu_rows,
            logit_rows=logit_rows,
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
        )

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

    def _read(self, rows: ChainRows, *where: Any, **how: Any) -> Tensor:
        """A pass of the draft model, which has ids of its own."""
        if self._input_ids is not None:
            tokens = self._input_ids.index_select(0, rows.tokens)
            rows = dataclasses.replace(rows, tokens=tokens)
        return self.forward(rows, *where, **how)
