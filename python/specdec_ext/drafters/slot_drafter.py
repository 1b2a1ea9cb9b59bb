"""Drafters that run on a step's stream: their drafts go into slots, nothing comes to the host.

A step that runs ahead is enqueued before the previous one was read. So its drafts are made
from what that one leaves on the device: hidden states, histories, pages.
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
    """A drafter's inputs: the D decoding requests of a step. The tensors have fixed addresses; in
    steps that the host runs they are NumPy arrays.

    layout       of the slots
    slots        [num_slots, slot_bytes] uint8
    slot_ids     [D] int32, -1: nobody (padding)
    max_drafts   [D] int32 drafts of this step, 0: none
    page_table   [D, pages] int32, what each request holds; enough for the drafts, too
    laws         how each samples, [D]; written for steps in which somebody `samples`
    samples      somebody draws tokens in this step
    status       [D] int32 StatusFlag bits, OR-ed in
    hidden       [num_slots, H] of the model's dtype: the head's input that each slot's golden token
                 was chosen from; None: nobody asked for it (SlotDrafter.needs_hidden)
    max_width    drafts of any one request in this step, an upper bound that the host knows; 1 where
                 nobody drafts
    max_kv_len   tokens and rows of any one request, an upper bound that the host knows
    pass_price   tokens that a pass of a draft model after the first has to bring to be worth its
                 time, where draft() may look at values; 0: not known
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

    @property
    def num_requests(self) -> int:
        return int(self.slot_ids.shape[0])

    def on_torch(self) -> DraftInputs:
        """The same memory as torch's tensors, where it is in arrays."""
        if not isinstance(self.slots, np.ndarray):
            return self
        laws = {f.name: as_torch(getattr(self.laws, f.name)) for f in fields(self.laws)}
        names = ("slots", "slot_ids", "max_drafts", "page_table", "status")
        parts: dict[str, Any] = {name: as_torch(getattr(self, name)) for name in names}
        hidden = None if self.hidden is None else as_torch(self.hidden)
        return replace(self, laws=replace(self.laws, **laws), hidden=hidden, **parts)


@dataclass(frozen=True)
class PromptInputs:
    """Rows of prompts that a step has read: P requests, each the next piece of its prompt.

    tokens       [R] int32 of all pieces
    slot_ids     [P] int32, -1: a request whose tokens the host chooses has none
    kv_len       [P] int32 tokens before the piece
    cu_rows      [P + 1] int32 first row of each piece
    page_table   [P, pages] int32
    max_rows, max_kv_len  of any one request, upper bounds that the host knows
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

    On a device draft() only enqueues work: it reads no value, waits for nothing, and everything
    that it launches follows from the sizes of its inputs, so that it can be recorded in a graph. On
    the CPU it runs when the step runs, and may look at values.

    name         of the method, for metrics
    needs_hidden the model's hidden states are kept for it
    """

    # A drafter may have more:
    #   read_prompts(PromptInputs)  called after the model's pass of a step with prompts
    #   after_forward(DeviceStep)  on a device, called behind the model's pass of a step
    #   pages_of: a model (num_layers, num_kv_heads, head_dim) that has pages of its own, with the
    #       ids of the target's; bind_cache(k_pages, v_pages) is called with them
    #   feature_pages: what else lies in pages of these ids, once they are bound
    #   moved_pages: on a device, the pair of them that accepted rows are moved in as in K and V
    #   after_commit(plan, layout, slots, PromptInputs | None)  called after the commit of a step
    #       that the host ran; the prompts among its requests, which come first, None: none
    #   draft_probs(num_requests) -> ops.DraftProbs | None  what the drafts of a step's so many
    #       decoding requests were drawn from, None: without chance; called after draft() in a step
    #       that samples
    #   prepare()  called once on the CPU, before the first draft(), whose time counts
    #   drafts_one_by_one: bool     draft() takes as long as a request's drafts are many
    #   passes_made: int            of a draft model, by the last draft(); 0: not known
    #   reads_every_step: bool      draft() is called in steps without drafts, too: max_drafts is 0
    name: str
    needs_hidden: bool

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """A request takes a slot: called when its first step is enqueued, before the operations of
        that step. What it changes on a device it changes by work on the current stream.

        options  of request/speculation.py; empty: it wants no drafts
        """
        ...

    def draft(self, inputs: DraftInputs) -> None:
        """Propose drafts (``ops.propose_drafts``) for the requests of a step that may draft."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Figures for LLM.get_metrics()["drafter"]: at least memory_bytes and device."""
        ...
