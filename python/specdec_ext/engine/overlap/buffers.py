"""The tensors of a step, made once at their largest size: their addresses never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext import ops
from specdec_ext._core import MAX_STEP_TOKENS
from specdec_ext.engine.staged_words import StagedWords
from specdec_ext.models.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StepBuffers", "StepTensors"]


@dataclass(frozen=True)
class StepTensors:
    """A step on the device: what a model reads, and where it puts its choices.

    Counts are what the host knows, upper bounds. A request may have no rows (it has ended, or it
    pads a graph's bucket); rows past cu_rows[B] are padding: token 0, position 0, no page. So the
    last choices may be those of padding rows; nobody reads them.

    step       what the model's pass is made from; `logit_rows` None: all rows
    parents    [R] int32 within the request: the parent's row, -1 for its first
    cu_logits  [B + 1] int32 first choice of each request
    sampled    [L] int32, written by the model: the best token of each needed row, -1 for a row of
               scores that holds a NaN
    needs_scores  somebody samples: the model returns float32 scores [n, V] of the needed rows, of
               which n may leave out padding, instead of writing `sampled`
    """

    step: DeviceStep
    parents: Tensor
    cu_logits: Tensor
    sampled: Tensor
    needs_scores: bool = False

    @property
    def status(self) -> Tensor:
        """[B] int32 StatusFlag bits, OR-ed in."""
        assert self.step.status is not None
        return self.step.status


class StepBuffers:
    """Rings in the host's memory, slots and step arrays in the device's.

    executor         _core.Executor; its rings are bound here
    synthetic_rates  of synthetic acceptance; (): acceptance is real
    """

    def __init__(
        self,
        executor: Any,
        device: torch.device | str = "cpu",
        synthetic_rates: Sequence[float] = (),
    ) -> None:
        self.vocab_size: int = executor.vocab_size
        self.layout = executor.slot_layout
        self.staging = executor.staging_layout
        device = torch.device(device)
        ring, pinned = executor.ring_size, device.type == "cuda"
        words, batch, rows = self.staging.words, self.staging.requests, self.staging.rows

        def host(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(ring, count, dtype=dtype, pin_memory=pinned)

        self.staging_ring = host(words, torch.int32)
        self.staging_ring[:, self.staging.page_table : self.staging.logit_rows] = -1
        # Until something is staged every request is padding.
        for ids in (self.staging.slot_ids, self.staging.commit_ids):
            self.staging_ring[:, ids : ids + batch] = -1
        self.entry_ring = host(executor.entry_bytes, torch.uint8)
        self.result_ring = host(executor.result_words, torch.int32)
        chosen, vocab = executor.max_host_rows, self.vocab_size
        self.score_ring = host(chosen * vocab, torch.float32).view(ring, chosen, vocab)
        tree = executor.tree_words
        self.tree_ring = host(batch * tree, torch.int32).view(ring, batch, tree)
        at = executor.tree_offset
        self._tree_bytes = slice(at, at + 4 * tree)
        executor.bind_rings(
            staging=self.staging_ring,
            entries=self.entry_ring,
            results=self.result_ring,
            scores=self.score_ring,
            trees=self.tree_ring,
        )

        def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots = ops.make_slots(self.layout, batch, device)
        self.staged = on_device(words)
        self.staged.copy_(self.staging_ring[0])  # as padding is until the first step
        self.staged_words = StagedWords(self.staging, torch)
        self.staged_words.words = self.staged
        self.tokens, self.positions = on_device(rows), on_device(rows)
        self.parents, self.sampled = on_device(rows), on_device(rows)
        self.mask = on_device(rows, 4)
        self.cu_rows, self.cu_logits = on_device(batch + 1), on_device(batch + 1)
        self.draft_rows = on_device(batch + 1)
        self.kv_len = on_device(batch)
        self.is_tree = on_device(batch, dtype=torch.uint8)
        self.path, self.path_len = on_device(batch, MAX_STEP_TOKENS), on_device(batch)
        # Nodes of the needed rows, and what accept_step or synthetic_step decides.
        self.choice_tokens, self.choice_parents = on_device(rows), on_device(rows)
        self.choice_positions = on_device(rows)
        self.accepted_path, self.accepted_len = on_device(batch, MAX_STEP_TOKENS), on_device(batch)
        self.emitted, self.num_emitted = on_device(batch, MAX_STEP_TOKENS), on_device(batch)
        self.synthetic_rates: Tensor | None = None
        if synthetic_rates:
            self.synthetic_rates = torch.tensor(synthetic_rates, dtype=torch.float64, device=device)
        # Rows that the host reads.
        self.host_scores = on_device(chosen, vocab, dtype=torch.float32)
        self.result_block = on_device(executor.result_words)
        words_each = self.layout.result_words
        self.results = self.result_block[: batch * words_each].view(batch, words_each)
        self.status = self.result_block[batch * words_each :]

    def tree_of(self, slot: int) -> Tensor:
        """[words] int32: the draft tree in a slot."""
        return self.slots[slot, self._tree_bytes].view(torch.int32)

    def staged_part(self, offset: int, count: int) -> Tensor:
        """A part of what the host staged for the step, on the device."""
        part: Tensor = self.staged_words.part(offset, count)
        return part

    def accept_results(self, rows: int, requests: int) -> ops.AcceptResults:
        """Where drafts are accepted, for a step of that size."""
        return ops.AcceptResults(
            sampled=self.sampled[:rows],
            path=self.accepted_path[:requests],
            path_len=self.accepted_len[:requests],
            emitted=self.emitted[:requests],
            num_emitted=self.num_emitted[:requests],
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of all of it, on the host and on the device."""
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t is not self.results and t is not self.status]
        return sum(t.numel() * t.element_size() for t in tensors)
