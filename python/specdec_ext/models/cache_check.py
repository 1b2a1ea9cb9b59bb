"""What both implementations do the same way: check their pages, and pick the greedy token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import ModelError
from .kv_storage import page_shape, stored_name

if TYPE_CHECKING:
    import torch

__all__ = ["check_cache", "greedy_ids"]


def check_cache(
    model: Any,
    k_pages: Any,
    v_pages: Any,
    device: torch.device | None = None,
    num_layers: int | None = None,
) -> None:
    """ModelError unless the pages have the shape and dtype that the model stores K and V in
    (kv_storage.py).

    pages   tensors, or the core's LazyZeros
    device  where they have to lie; None: the CPU
    num_layers  whose pages they are; None: all
    """
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        layers, _, heads, _, width = page_shape(model, 1, 1, num_layers)
        fixed = (layers, heads, width)
        found = tuple(pages.shape)
        if len(found) != 5 or (found[0], found[2], found[4]) != fixed:
            raise ModelError(
                f"{name} has shape {list(found)}, expected [{fixed[0]}, pages, {fixed[1]}, "
                f"page_size, {fixed[2]}]"
            )
        dtype, wanted = str(pages.dtype).removeprefix("torch."), stored_name(model)
        if dtype != wanted:
            raise ModelError(f"{name} is {dtype}, the model needs {wanted}")
        if isinstance(pages, _core.LazyZeros):
            continue  # contiguous, on the host
        where = "cpu" if device is None else str(device)
        if not pages.is_contiguous() or str(pages.device) != where:
            where = "the CPU" if where == "cpu" else where
            raise ModelError(f"{name} must be contiguous and on {where}")
    if tuple(k_pages.shape) != tuple(v_pages.shape):
        raise ModelError(
            f"k_pages {list(k_pages.shape)} and v_pages {list(v_pages.shape)} differ in shape"
        )


def greedy_ids(scores: torch.Tensor) -> torch.Tensor:
    """int32 [L]: the first largest score of each row of float32 [L, V], -1 for a row with a NaN."""
    import torch

    if scores.shape[0] == 0:
        return torch.empty(0, dtype=torch.int32, device=scores.device)
    # max() propagates NaN, and returns the first index among equals.
    values, ids = scores.max(dim=-1)
    return torch.where(values.isnan(), -1, ids).to(torch.int32)
