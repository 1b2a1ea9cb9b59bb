"""The C++ executor of an engine, wherever its steps run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _core
from ..config.engine import SchedulerConfig
from .memory_plan import MemoryPlan

__all__ = ["make_executor"]


def make_executor(
    vocab_size: int,
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    drafting: Mapping[str, Any],
    pages: tuple[Any, Any] = (None, None),
    **options: Any,
) -> Any:
    """A _core.Executor with the sizes of `memory`.

    drafting  the executor's keywords for how drafts are made
    pages     K and V of steps that the host runs; None of both: steps are enqueued on a stream
    options   more of the executor's keywords
    """
    return _core.Executor(
        k_pages=pages[0],
        v_pages=pages[1],
        vocab_size=vocab_size,
        max_batch_size=memory.max_batch_size,
        max_seq_len=memory.max_seq_len,
        max_num_tokens=memory.max_num_tokens,
        num_pages=memory.num_pages,
        page_size=memory.tokens_per_block,
        overlap_depth=scheduler.resolved_depth,
        policy=scheduler.policy,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        attention_window=memory.attention_window,
        sink_tokens=memory.sink_tokens,
        narrow_windows=list(memory.narrow_windows),
        narrow_sink_tokens=memory.narrow_sink_tokens,
        narrow_pages=list(memory.narrow_pages),
        max_prefill_slowdown=scheduler.max_prefill_slowdown or 0.0,
        num_host_pages=memory.host_num_pages,
        host_page_bytes=memory.host_page_bytes,
        **drafting,
        **options,
    )
