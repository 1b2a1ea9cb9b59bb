"""A draft model's own device as the engine sees it: where it is, and what room there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..log import logger
from .memory_plan import available_memory_bytes

if TYPE_CHECKING:
    from ..drafters.draft_target.device_apart import OwnDevice
    from ..models.place import Place
    from .memory_plan import MemoryPlan

__all__ = ["free_bytes_apart", "own_device_of", "place_of_pages"]


def free_bytes_apart(place: Place, home: Place, reserved: int) -> int | None:
    """Memory for the draft model's pages, where it is not the target's; None: it is.

    reserved  bytes there that something else will take
    """
    if place == home:
        return None
    there = place.free_bytes()
    return max(0, (available_memory_bytes() if there is None else there) - reserved)


def own_device_of(drafter: Any) -> OwnDevice | None:
    """Its own device; None: it drafts on the model's, or there is no drafter."""
    own: OwnDevice | None = getattr(drafter, "own_device", None)
    return own


def place_of_pages(drafter: Any, place: Place, memory: MemoryPlan) -> Place:
    """Where a drafter's pages lie; place: the model's."""
    own = own_device_of(drafter)
    if own is None:
        return place
    if memory.draft_num_pages < memory.num_pages:
        logger.warning(
            "%s: room for %d pages of the draft model, the target has %d; requests that hold "
            "others decode without drafts",
            own.place.name, memory.draft_num_pages, memory.num_pages,
        )  # fmt: skip
    return own.place
