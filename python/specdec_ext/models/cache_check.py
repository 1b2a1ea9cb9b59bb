"""What both implementations do the same way: check their pages, and pick the greedy token."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError

__all__ = ["check_cache", "greedy_ids"]


def check_cache(
    model: Any,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    device: torch.device | None = None,
) -> None:
    """ModelError unless the pages are [layers, P, G, S, K] of the model's shape and dtype.

    device  where they have to lie; None: the CPU
    """
    device = device or torch.device("cpu")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        fixed = (model.num_layers, model.num_kv_heads, model.head_dim)
        found = tuple(pages.shape)
        if len(found) != 5 or (found[0], found[2], found[4]) != fixed:
            raise ModelError(
                f"{name} has shape {list(found)}, expected [{fixed[0]}, pages, {fixed[1]}, "
                f"page_size, {fixed[2]}]"
            )
        if pages.dtype != model.kv_dtype:
            raise ModelError(f"{name} is {pages.dtype}, the model needs {model.kv_dtype}")
        if not pages.is_contiguous() or pages.device != device:
            where = "the CPU" if device.type == "cpu" else str(device)
            raise ModelError(f"{name} must be contiguous and on {where}")
    if k_pages.shape != v_pages.shape:
        raise ModelError(
            f"k_pages {list(k_pages.shape)} and v_pages {list(v_pages.shape)} differ in shape"
        )


def greedy_ids(scores: torch.Tensor) -> torch.Tensor:
    """int32 [L]: the first largest score of each row of float32 [L, V], -1 for a row with a NaN."""
    if scores.shape[0] == 0:
        return torch.empty(0, dtype=torch.int32, device=scores.device)
    # max() propagates NaN, and returns the first index among equals.
    values, ids = scores.max(dim=-1)
    return torch.where(values.isnan(), -1, ids).to(torch.int32)
