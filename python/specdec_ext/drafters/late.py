"""A drafter that is loaded when it is asked for the first time: the first token does not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .slot_drafter import DraftInputs, SlotDrafter

__all__ = ["LateDrafter"]


class LateDrafter:
    """See SlotDrafter. For drafters that are known to fit their target, and read hidden states.

    load  makes the drafter
    """

    needs_hidden = True

    def __init__(self, name: str, load: Callable[[], SlotDrafter]) -> None:
        self.name = name
        self._load = load
        self._drafter: SlotDrafter | None = None
        self._entered: dict[int, Mapping[str, Any]] = {}  # slot -> options, until it is loaded

    def prepare(self) -> None:
        """See SlotDrafter."""
        drafter = self._load()
        for slot, options in self._entered.items():
            drafter.enter(slot, options)
        self._entered = {}
        self._drafter = drafter

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""
        if self._drafter is None:
            self._entered[slot] = options
        else:
            self._drafter.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter. Nothing where it could not be loaded."""
        if self._drafter is not None:
            self._drafter.draft(inputs)

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter."""
        if self._drafter is None:
            return {"memory_bytes": 0, "device": "cpu", "loaded": False}
        return {**self._drafter.stats(), "loaded": True}
