"""Medusa in a step: heads on kept hidden states, trees of their guesses into the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import _core
from ...config.medusa import MedusaDecodingConfig
from ...models.place import CPU, Place
from ..slot_drafter import DraftInputs
from .open_heads import Rates, open_heads
from .packed_heads import PackedHeads

if TYPE_CHECKING:
    from .device_slots import MedusaOnDevice

__all__ = ["MedusaDrafter"]


class MedusaDrafter:
    """See SlotDrafter. `config` is the given one with the heads that the file really has.

    A step takes as many of the first nodes as it has room for. Those of an adaptive request are in
    the order of the acceptance that the heads' trainer has measured; of any other in their own.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(
        self,
        config: MedusaDecodingConfig,
        model: Any,
        *,
        max_requests: int,
        allow_pickle: bool = False,
    ) -> None:
        self.config, self._heads, self._rates = open_heads(config, model, allow_pickle=allow_pickle)
        self._place: Place = getattr(model, "place", CPU)
        self._side: MedusaOnDevice | _OnHost
        if isinstance(self._heads, PackedHeads):
            self._side = _OnHost(self._heads, self._rates, max_requests, model.vocab_size)
        else:
            from .device_slots import MedusaOnDevice

            nodes = self.config.max_draft_len
            self._side = MedusaOnDevice(self._heads, self._rates, model, max_requests, nodes)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter. The options: "medusa_choices", the request's tree, and "adaptive"."""
        self._side.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        self._side.draft(inputs)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take for a while besides weights and buffers: to choose the
        best guesses."""
        if isinstance(self._heads, PackedHeads):
            return 0
        return self._heads.scratch_bytes(max_requests) // 2  # the scores have a buffer

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter; on the CPU also what was seen of guesses and trees. guess_rates[h][r]:
        how often head h's guess of rank r was right."""
        return {
            "memory_bytes": self._heads.weight_bytes,
            "device": self._place.name,
            "num_medusa_heads": self._heads.num_heads,
            **self._side.stats(),
        }

    def measured_rates(self) -> tuple[list[list[float]], list[float]]:
        """On the CPU: (how often each head's guess of each rank was right, over all steps so far
        [heads][ranks], observations of each head)."""
        assert isinstance(self._side, _OnHost)
        return self._side.measured_rates()

    @property
    def head_seconds_per_step(self) -> float:
        """On the CPU: of evaluating the heads."""
        assert isinstance(self._side, _OnHost)
        return self._side.head_seconds_per_step


class _OnHost:
    """On the CPU a step runs when it is enqueued: heads are asked for the requests that draft, by
    _core.MedusaDrafter."""

    def __init__(
        self, heads: PackedHeads, rates: Rates, max_requests: int, vocab_size: int
    ) -> None:
        self._core = _core.MedusaDrafter(
            heads.core, rates=rates, max_requests=max_requests, vocab_size=vocab_size
        )

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._core.enter(slot, options.get("medusa_choices", ()), options.get("adaptive", True))

    def draft(self, inputs: DraftInputs) -> None:
        self._core.draft(
            inputs.layout, inputs.slots, inputs.slot_ids, inputs.max_drafts, inputs.hidden
        )

    def measured_rates(self) -> tuple[list[list[float]], list[float]]:
        """(rates [heads][ranks] over all steps so far, observations of each head)."""
        return self._core.measured()

    @property
    def head_seconds_per_step(self) -> float:
        made = self._core.stats()
        return float(made["head_seconds"]) / max(int(made["steps"]), 1)

    def stats(self) -> dict[str, Any]:
        made = self._core.stats()
        rates, _ = self.measured_rates()
        return {
            "head_seconds": made["head_seconds"],
            "head_thread_seconds": made["head_thread_seconds"],
            "num_proposals": made["proposals"],
            "num_idle": made["idle"],
            "mean_nodes": made["nodes"] / max(made["proposals"], 1),
            "guess_rates": [[round(rate, 4) for rate in row] for row in rates],
        }
