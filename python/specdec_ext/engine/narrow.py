"""Which layers hold their part of a page only while they see it (docs/attention_windows.md)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from ..models.kv_storage import token_bytes
from ..models.native_config import NotNativeError, native_shape
from ..models.shard import kv_heads_of_ranks
from ..models.windows import AttentionSpan, narrow_windows

__all__ = ["held_windows"]


def held_windows(
    model: Any,
    stored: str,
    span: AttentionSpan,
    windows: Sequence[int],
    *,
    on_cpu: bool,
    tokens_per_block: int,
    ranks: int = 1,
    model_impl: str = "auto",
) -> tuple[int, ...]:
    """By layer, the windows of layers that give their part of a page back while others keep theirs,
    0 for others; empty where nobody can.

    On the CPU the operating system takes the memory, so the part has to be whole pages of it, on
    every rank. On a device such layers have pools of their own, which the native decoder reads.

    model   a loaded model, or the ModelConfig of one that is not loaded yet, which model_impl is
            asked for
    stored  dtype of its pages
    span    what a row of any layer sees
    ranks   that share the model
    """
    if not on_cpu:
        return narrow_windows(windows, span) if _is_native(model, model_impl) else ()
    shard = getattr(model, "shard", None)
    heads = model.num_kv_heads if shard is None else shard.kv_heads[-1]
    of_head = token_bytes(model, stored) // (2 * model.num_layers * model.num_kv_heads)
    page = of_head * tokens_per_block
    if any(page * count % mmap.PAGESIZE for count in kv_heads_of_ranks(heads, ranks)):
        return ()
    return narrow_windows(windows, span)


def _is_native(model: Any, model_impl: str) -> bool:
    impl = getattr(model, "impl", None)
    if impl is not None:
        return bool(impl == "native")
    if model_impl == "transformers":
        return False
    try:
        native_shape(model)
    except NotNativeError:
        return False
    return True
