"""Drafters that run on a step's stream: their drafts go into slots, not to the host.

A step that runs ahead is enqueued before the host has read the previous one. So its drafts are made
from what the previous step leaves on the device: hidden states, histories, pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..models.host_arrays import as_torch

if TYPE_CHECKING:
    from ..ops import SamplingLaws, SlotLayout

Tensor = Any  # torch's, or an array on the host

__all__ = ["DraftInputs", "PromptInputs", "SlotDrafter"]


@dataclass(frozen=True)
class DraftInputs:
    """A drafter's inputs: the D decoding requests of a step.

    The tensors have fixed addresses; in steps that the host runs they are NumPy arrays.

    layout       layout of the slots
    slots        [num_slots, slot_bytes] uint8
    slot_ids     [D] int32, -1: padding
    max_drafts   [D] int32, the most drafts of each request in this step, 0: none
    page_table   [D, pages] int32, the pages of each request, enough for the drafts, too
    laws         how each request samples, [D]; valid if `samples`
    samples      a request draws tokens in this step
    status       [D] int32 StatusFlag bits, OR-ed in
    hidden       [num_slots, H] of the model's dtype: the head's input from which each slot's golden
                 token was chosen; None unless SlotDrafter.needs_hidden
    max_width    an upper bound of any request's drafts in this step, known to the host; 1 if no
                 request drafts
    max_kv_len   an upper bound of any request's tokens and rows, known to the host
    pass_price   tokens that a draft model's pass after the first must bring to be worth its time,
                 if draft() may read values; 0: not known
    recorded     a step of these sizes is recorded, so they come again
    """

    layout: SlotLayout
    slots: Tensor
    slot_ids: Tensor
    max_drafts: Tensor
    page_table: Tensor
    laws: SamplingLaws
    samples: bool
    status: Tensor
    hidden: Tensor | None
    max_width: int
    max_kv_len: int
    pass_price: float = 0.0
    recorded: bool = False

    @property
    def num_requests(self) -> int:
        return int(self.slot_ids.shape[0])

    def on_torch(self) -> DraftInputs:
        """The same inputs as torch tensors; arrays are converted without a copy."""
        if not isinstance(self.slots, np.ndarray):
            return self
        laws = {f.name: as_torch(getattr(self.laws, f.name)) for f in fields(self.laws)}
        names = ("slots", "slot_ids", "max_drafts", "page_table", "status")
        parts: dict[str, Any] = {name: as_torch(getattr(self, name)) for name in names}
        hidden = None if self.hidden is None else as_torch(self.hidden)
        return replace(self, laws=replace(self.laws, **laws), hidden=hidden, **parts)


@dataclass(frozen=True)
class PromptInputs:
    """The prompt rows of a step: for each of P requests the next piece of its prompt.

    tokens       [R] int32, the tokens of all pieces
    slot_ids     [P] int32, -1: the host chooses this request's tokens, and it has no slot
    kv_len       [P] int32, tokens before the piece
    cu_rows      [P + 1] int32, first row of each piece
    page_table   [P, pages] int32
    max_rows, max_kv_len
                 upper bounds for any request, known to the host
    """

    tokens: Tensor
    slot_ids: Tensor
    kv_len: Tensor
    cu_rows: Tensor
    page_table: Tensor
    max_rows: int
    max_kv_len: int


class SlotDrafter(Protocol):
    """Called when a step is enqueued, before ``draft_step``; see DraftInputs.

    On a device draft() only enqueues work. It reads no value and waits for nothing, and its
    launches follow from the sizes of its inputs, so it can be recorded in a graph. On the CPU it
    runs when the step runs and may read values.

    name          name of the method, for metrics
    needs_hidden  True: the model's hidden states are kept for it
    """

    # A drafter may also have:
    #   read_prompts(PromptInputs)  called after the model's pass of a step with prompts
    #   after_forward(DeviceStep)  on a device, called after the model's pass of a step
    #   pages_of: a model (num_layers, num_kv_heads, head_dim) with pages of its own, which have the
    #       ids of the target's; bind_cache(k_pages, v_pages) is called with them
    #   feature_pages: other data in pages of these ids, once they are bound
    #   moved_pages: on a device, the pair of pools in which accepted rows are moved as in K and V
    #   after_commit(plan, layout, slots, PromptInputs | None)  called after the commit of a step
    #       that the host ran, with the prompts among its requests, which come first; None: none
    #   draft_probs(num_requests) -> ops.DraftProbs | None  the distributions that the drafts of a
    #       step's decoding requests were drawn from; None: they were chosen. Called after draft()
    #       in a step that samples
    #   prepare()  called once on the CPU before the first draft(), so that its time is not counted
    #   drafts_one_by_one: bool     the time of draft() grows with the drafts of a request
    #   passes_made: int            passes of a draft model in the last draft(); 0: not known
    #   own_device: OwnDevice | None  where its drafts and pages are, if that is not the target's
    #       device: draft() and read_prompts() are launched one by one, and enqueue on both devices
    #   reads_every_step: bool      draft() is also called in steps without drafts (max_drafts 0)
    name: str
    needs_hidden: bool

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """Called when a request takes a slot, before the operations of its first step are enqueued.

        On a device it changes memory only by work on the current stream.

        options  draft options of request/speculation.py; empty: the request wants no drafts
        """
        ...

    def draft(self, inputs: DraftInputs) -> None:
        """Propose drafts (``ops.propose_drafts``) for the requests of a step that may draft."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Figures for LLM.get_metrics()["drafter"]: at least memory_bytes and device."""
        ...
