"""What drafting chains and trees with a draft model on a device share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from .device_forward import ChainRows, DrafterForward
from .device_rows import DeviceReader, FirstPass, PromptPacker

if TYPE_CHECKING:
    from torch import Tensor

    from ...config.grown_tree import GrownTreeConfig
    from ...models.place import Place
    from ..slot_drafter import DraftInputs, PromptInputs
    from ..vocabulary import VocabularyMap
    from .device_apart import OwnDevice
    from .draft_sizes import DraftSizes, TextReads

__all__ = ["DeviceSide", "MakeForward"]

MakeForward = Callable[[int, int], DrafterForward]


class DeviceSide(ABC):
    """HostPasses' verbs on a device. Everything that a step launches follows from its sizes.

    place         of the drafter
    make_forward  what runs the passes, for so many rows and rows whose scores are needed
    own_device    place is not the target's; None: it is
    """

    def __init__(
        self,
        config: GrownTreeConfig,
        vocabulary: VocabularyMap,
        place: Place,
        sizes: DraftSizes,
        reads: TextReads,
        make_forward: MakeForward,
        own_device: OwnDevice | None = None,
        *,
        max_scores: int,
    ) -> None:
        """max_scores  rows of a pass whose scores are needed"""
        max_requests, max_rows = sizes.max_requests, sizes.max_rows
        self.config, self._place, self._own = config, place, own_device
        self._home = place if own_device is None else own_device.home
        self._vocab_size, self._max_len = sizes.vocab_size, reads.max_len
        self._num_columns = vocabulary.num_scores
        self._num_pages, self._page_size = 0, 1  # of the drafter
        self._prompts = PromptPacker(place, reads, max_rows=max_rows, max_requests=max_requests)
        self._reader = DeviceReader(place, reads, max_requests=max_requests)
        self.forward = make_forward(max_rows, max_scores)
        self._ints: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        # Read from the slots, on the target's device.
        there = {**self._ints, "device": self._home.device}
        self._last = torch.zeros(max_requests, reads.last, **there)
        self._lens = torch.zeros(max_requests, **there)
        self._cu_rows = torch.zeros(max_requests + 1, **self._ints)
        # Its ids of the target's tokens, the target's of its columns; None: they are the same.
        self._input_ids, self._output_ids = (
            torch.tensor(ids, **self._ints) if ids else None
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
        own = 0 if self._own is None else self._own.memory_bytes
        return self.forward.memory_bytes + kept + own

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The drafter's pages [layers, P, G, S, K]."""
        self.forward.bind_cache(k_pages, v_pages)
        self._num_pages, self._page_size = k_pages.shape[1], k_pages.shape[3]

    @abstractmethod
    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, *, wants_survival: bool) -> None:
        """See SlotDrafter."""
        requests = inputs.num_requests
        last, lens = self._last[:requests], self._lens[:requests]
        ops.recent_tokens(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens=last,
            lens=lens,
            backend=self._home.backend,
        )
        if self._own is None:
            made = self._make(inputs, last, lens, wants_survival=wants_survival)
        else:
            made = self._make_there(self._own, inputs, last, lens, wants_survival=wants_survival)
        self._propose(inputs, made)

    def _make_there(
        self, own: OwnDevice, inputs: DraftInputs, last: Tensor, lens: Tensor, **how: Any
    ) -> list[Tensor]:
        """_make() on a device of its own; what it made is on the target's."""
        there, last, lens = own.texts(inputs, last, lens)
        sizes = (len(lens), inputs.max_width, inputs.max_kv_len, inputs.samples, *how.values())
        made = own.make(
            lambda: self._make(there, last, lens, **how), sizes if inputs.recorded else None
        )
        return own.bring(made, self._probs_of(inputs))

    def _probs_of(self, inputs: DraftInputs) -> ops.DraftProbs | None:
        """On its own device, what the drafts of this step are drawn from; None: nothing is."""
        return None

    @abstractmethod
    def _make(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, *, wants_survival: bool
    ) -> list[Tensor]:
        """What _propose() takes.

        last  [D, reads] int32 the end of each text; lens [D] int32 its length, 0: no drafts
        """

    @abstractmethod
    def _propose(self, inputs: DraftInputs, made: Sequence[Tensor]) -> None:
        """Into the slots."""

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        """What the drafts of the step's requests were drawn from; None: nothing is drawn."""
        return None

    @torch.inference_mode()
    def read_prompts(self, prompts: PromptInputs) -> None:
        """See SlotDrafter."""
        if self._own is None:
            return self._read_prompts(prompts)
        there = self._own.prompts(prompts)
        self._own.run(lambda: self._read_prompts(there))
        return None

    def _read_prompts(self, prompts: PromptInputs) -> None:
        self._read(
            self._prompts.pack(prompts),
            prompts.page_table,
            self._cu_rows[:1],  # what the pass gives is dropped: any row
            needs_scores=False,
            max_kv_len=prompts.max_kv_len,
        )

    def _read_texts(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, width: int, *, needs_scores: bool
    ) -> tuple[FirstPass, Tensor]:
        """The step's first pass, and what it gave. width: drafts of any one request, at most."""
        first = self._reader.first(inputs, last, lens, width)
        result = self._read(
            first.rows,
            inputs.page_table,
            first.logit_rows,
            needs_scores=needs_scores,
            max_kv_len=inputs.max_kv_len,
        )
        return first, result

    def _read(self, rows: ChainRows, *where: Any, **how: Any) -> Tensor:
        """A pass of the draft model, which has ids of its own."""
        if self._input_ids is not None:
            tokens = self._input_ids.index_select(0, rows.tokens)
            rows = dataclasses.replace(rows, tokens=tokens)
        return self.forward(rows, *where, **how)
