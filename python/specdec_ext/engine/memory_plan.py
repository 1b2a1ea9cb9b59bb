"""How many KV pages an engine gets and what follows from that. Pure arithmetic, shown by `inspect`.

Without KvCacheConfig.max_tokens the pool holds max_batch_size sequences of max_seq_len tokens (each
with room for the drafts of one step), limited to free_gpu_memory_fraction of the free memory and,
on CPU, to 4 GiB: host memory belongs to other programs too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import _core
from ..config.engine import KvCacheConfig, SchedulerConfig, pages_for
from ..config.limits import MAX_KNOWN_DRAFTS
from ..errors import ConfigError
from ..models.windows import AttentionSpan

__all__ = [
    "CPU_POOL_LIMIT_BYTES",
    "DraftPages",
    "MemoryPlan",
    "available_memory_bytes",
    "pages_in_window",
    "plan_memory",
]

CPU_POOL_LIMIT_BYTES = 4 << 30
# Rows of one forward pass unless configured: enough for a long prefill block to be efficient, small
# enough that decoding requests are not held up for long behind someone's prompt.
DEFAULT_MAX_NUM_TOKENS = 1024


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of one engine. Lengths in tokens."""

    tokens_per_block: int
    num_pages: int
    pool_tokens: int
    bytes_per_token: int  # K and V of all layers
    pool_bytes: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    limited_by: str  # what fixed num_pages
    # A draft model's own pages, out of the same memory; 0: there is none.
    draft_num_pages: int = 0
    draft_bytes_per_token: int = 0
    draft_pool_bytes: int = 0
    # CUDA graphs of steps, measured before the pages were sized; 0: there are none.
    graph_bytes: int = 0
    # What a row of any layer sees at most; 0: everything.
    attention_window: int = 0
    sink_tokens: int = 0
    # By layer: windows narrower than that, whose layers hold their part of a page only while they
    # see it, and the sink tokens of those layers. Empty: all layers keep theirs. For how many such
    # parts there is room: by distinct window, ascending.
    narrow_windows: tuple[int, ...] = ()
    narrow_sink_tokens: int = 0
    narrow_pages: tuple[int, ...] = ()
    # The host's pool for preempted requests; a page of it has the draft model's K/V, too. 0: none.
    host_num_pages: int = 0
    host_page_bytes: int = 0

    @property
    def narrow_layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each distinct narrow window, ascending."""
        windows = self.narrow_windows
        return tuple(
            tuple(layer for layer, window in enumerate(windows) if window == narrow)
            for narrow in sorted(set(windows) - {0})
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DraftPages:
    """What a draft model's K/V asks for.

    bytes_per_token  K and V of all its layers
    max_tokens       DraftTargetDecodingConfig.max_kv_tokens; None: as many as the target's
    free_bytes       of its own device; None: it shares the target's memory
    """

    bytes_per_token: int
    max_tokens: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True)
class _PoolBytes:
    """Bytes that a pool of pages takes at most.

    always  of each page
    narrow  (pages, bytes of each): of layers that hold no more than so many pages at once
    """

    always: int
    narrow: tuple[tuple[int, int], ...] = ()

    def of(self, pages: int) -> int:
        return pages * self.always + sum(min(pages, most) * each for most, each in self.narrow)

    def pages_within(self, limit: int) -> int:
        """The most pages that take no more than `limit` bytes."""
        low, high = 0, max(0, limit) // self.always
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle) <= limit else (low, middle - 1)
        return low


def available_memory_bytes() -> int:
    """Host memory that could be allocated now, the process's cgroup limit included."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:  # not Linux: free pages are a lower bound
        pass
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            with (
                open(limit_file, encoding="ascii") as limit,
                open(used_file, encoding="ascii") as used,
            ):
                text = limit.read().strip()
                if text != "max":
                    available = min(available, max(0, int(text) - int(used.read())))
        except (OSError, ValueError):
            continue
    return available


def plan_memory(
    *,
    bytes_per_token: int,
    max_position: int,
    draft_len: int,
    kv_cache: KvCacheConfig,
    scheduler: SchedulerConfig,
    free_bytes: int,
    draft: DraftPages | None = None,
    pool_limit_bytes: int | None = CPU_POOL_LIMIT_BYTES,
    span: AttentionSpan | None = None,
    narrow: Sequence[int] = (),
    narrow_sinks: int = 0,
    host_free_bytes: int | None = None,
) -> MemoryPlan:
    """Sizes for a model, whose K/V takes `bytes_per_token` in all layers, and one step's drafts.

    pool_limit_bytes bounds a pool whose size nobody has asked for; None (a GPU, whose memory is
    there for this): the fraction of the free memory alone does.

    With a window (`span`) a text takes the pages that it shows, however long it is. Layers with a
    `narrow` window (by layer, 0 for none) and so many sink tokens hold theirs of each page only
    while it shows them.

    The pages of a draft model come out of the same budget: its max_tokens, or one page for each of
    the target's. With a device of its own they come out of that one's memory, and there may be
    fewer than the target has.

    host_free_bytes bounds KvCacheConfig.host_cache_size; None: nothing does.

    Raises ConfigError when the configuration contradicts the model or does not fit the memory.
    """
    page = kv_cache.tokens_per_block
    page_bytes = page * bytes_per_token
    every_draft_page = page * draft.bytes_per_token if draft is not None else 0
    apart = draft is not None and draft.free_bytes is not None
    # Here: of pages that share the target's memory.
    draft_page_bytes = 0 if apart else every_draft_page
    own_pages = pages_for(draft.max_tokens, page) if draft is not None and draft.max_tokens else 0
    own_bytes = own_pages * draft_page_bytes
    wanted_len = scheduler.max_seq_len or max_position
    if wanted_len > max_position:
        raise ConfigError(
            f"SchedulerConfig.max_seq_len = {wanted_len} is greater than the model's "
            f"max_position_embeddings = {max_position}; lower max_seq_len or leave it None"
        )
    limit_bytes = int(free_bytes * kv_cache.free_gpu_memory_fraction)
    if pool_limit_bytes is not None:
        limit_bytes = min(limit_bytes, pool_limit_bytes)
    span = span or AttentionSpan()
    # Rows of a step: drafts, or as many as prediction and grammar make.
    step = 1 + max(draft_len, MAX_KNOWN_DRAFTS)

    def in_window(length: int) -> int:
        return pages_in_window(kv_cache, scheduler, span, length, step)

    # What each page of the target costs, its draft page included.
    layer_bytes = page_bytes // len(narrow) if narrow else 0
    groups = sorted(set(narrow) - {0})
    held = [
        _pages_behind(kv_cache, scheduler, window, narrow_sinks, wanted_len, step)
        for window in groups
    ]
    slim = sum(window > 0 for window in narrow)
    pair = _PoolBytes(
        page_bytes - layer_bytes * slim + (0 if own_pages else draft_page_bytes),
        tuple(
            (pages, layer_bytes * list(narrow).count(window))
            for pages, window in zip(held, groups, strict=True)
        ),
    )
    pages_per_sequence = min(pages_for(wanted_len + draft_len, page), in_window(wanted_len))
    if kv_cache.max_tokens is not None:
        num_pages = pages_for(kv_cache.max_tokens, page)
        limited_by = f"KvCacheConfig.max_tokens = {kv_cache.max_tokens}"
        needed = pair.of(num_pages) + own_bytes
        if needed > free_bytes * kv_cache.free_gpu_memory_fraction:
            of_draft = own_bytes or num_pages * draft_page_bytes
            share = f" ({of_draft} of them for the draft model)" if of_draft else ""
            raise ConfigError(
                f"KvCacheConfig.max_tokens = {kv_cache.max_tokens} needs "
                f"{needed} bytes of KV cache{share}, limit "
                f"{int(free_bytes * kv_cache.free_gpu_memory_fraction)} "
                f"({kv_cache.free_gpu_memory_fraction:g} of {free_bytes} free); lower max_tokens"
            )
    else:
        num_pages = pages_per_sequence * scheduler.max_batch_size
        limited_by = "max_batch_size x max_seq_len"
        if own_pages and own_bytes + pair.of(1) > limit_bytes:
            assert draft is not None
            raise ConfigError(
                f"DraftTargetDecodingConfig.max_kv_tokens = {draft.max_tokens} needs {own_bytes} "
                f"bytes of KV cache, which leaves no page for the target within {limit_bytes} "
                "bytes; lower max_kv_tokens or leave it None"
            )
        if pair.of(num_pages) + own_bytes > limit_bytes:
            num_pages = pair.pages_within(limit_bytes - own_bytes)
            limited_by = (
                "4 GiB CPU limit (set KvCacheConfig.max_tokens for more)"
                if limit_bytes == pool_limit_bytes
                else f"free_gpu_memory_fraction = {kv_cache.free_gpu_memory_fraction:g} of "
                f"{free_bytes} free bytes"
            )
    pool_tokens = num_pages * page
    if scheduler.max_seq_len is None and in_window(wanted_len) > num_pages:
        wanted_len = min(wanted_len, pool_tokens - draft_len)
    if num_pages < 1 or wanted_len < 2:
        raise ConfigError(
            f"KV cache of {num_pages} pages x {page} tokens ({limited_by}) cannot hold a prompt "
            f"token, an output token and max_draft_len = {draft_len} drafts; raise "
            f"KvCacheConfig.max_tokens to at least {draft_len + 2}, or free memory"
        )
    draft_pages = 0 if draft is None else own_pages or num_pages
    if draft is not None and draft.free_bytes is not None:
        draft_pages = _pages_apart(draft, draft_pages, page, kv_cache.free_gpu_memory_fraction)
    step_tokens = draft_len + 1
    max_num_tokens = scheduler.max_num_tokens
    if max_num_tokens is None:
        max_num_tokens = max(DEFAULT_MAX_NUM_TOKENS, scheduler.max_batch_size * step_tokens)
        if not scheduler.enable_chunked_prefill:
            max_num_tokens = max(max_num_tokens, wanted_len)
    if max_num_tokens < scheduler.max_batch_size:
        raise ConfigError(
            f"SchedulerConfig.max_num_tokens = {max_num_tokens} is less than max_batch_size = "
            f"{scheduler.max_batch_size}: a step has at least one row per request; raise "
            "max_num_tokens or lower max_batch_size"
        )
    if max_num_tokens < step_tokens:
        raise ConfigError(
            f"SchedulerConfig.max_num_tokens = {max_num_tokens} is less than the {step_tokens} "
            f"step tokens of one request (max_draft_len = {draft_len}); raise max_num_tokens or "
            "shorten the drafts"
        )
    return MemoryPlan(
        tokens_per_block=page,
        num_pages=num_pages,
        pool_tokens=pool_tokens,
        bytes_per_token=bytes_per_token,
        pool_bytes=pair.of(num_pages) - (0 if own_pages else num_pages * draft_page_bytes),
        max_seq_len=wanted_len,
        max_batch_size=scheduler.max_batch_size,
        max_num_tokens=max_num_tokens,
        max_draft_len=draft_len,
        limited_by=limited_by,
        draft_num_pages=draft_pages,
        draft_bytes_per_token=0 if draft is None else draft.bytes_per_token,
        draft_pool_bytes=draft_pages * every_draft_page,
        attention_window=span.window,
        sink_tokens=span.sink_tokens,
        narrow_windows=tuple(narrow),
        narrow_sink_tokens=narrow_sinks if narrow else 0,
        narrow_pages=tuple(min(pages, num_pages) for pages in held),
        host_num_pages=_host_pages(
            kv_cache, scheduler, page_bytes + every_draft_page, host_free_bytes
        ),
        host_page_bytes=page_bytes + every_draft_page if kv_cache.host_cache_size else 0,
    )


def _pages_apart(draft: DraftPages, wanted: int, page: int, fraction: float) -> int:
    """Pages of a draft model on a device of its own: as many as are wanted, or as fit."""
    assert draft.free_bytes is not None
    need, limit = page * draft.bytes_per_token, int(draft.free_bytes * fraction)
    pages = min(wanted, limit // need)
    if pages < 1 or (draft.max_tokens and pages < wanted):
        what = f"max_kv_tokens = {draft.max_tokens}" if draft.max_tokens else "device"
        raise ConfigError(
            f"DraftTargetDecodingConfig.{what}: {wanted} pages of {page} tokens need "
            f"{wanted * need} bytes, limit {limit} bytes on the draft model's device "
            f"({fraction:g} of {draft.free_bytes} free); lower max_kv_tokens, or give the draft "
            "model a device with more room"
        )
    return pages


def _host_pages(
    kv_cache: KvCacheConfig, scheduler: SchedulerConfig, page_bytes: int, free_bytes: int | None
) -> int:
    """Pages of the host's pool. Raises ConfigError for a size that can never be used."""
    size, where = kv_cache.host_cache_size, "KvCacheConfig.host_cache_size"
    if size == 0:
        return 0
    if scheduler.policy != "max_utilization":
        raise ConfigError(
            f"{where} = {size} with SchedulerConfig.policy = {scheduler.policy!r}: nobody gives "
            "pages back under it, so the memory would lie idle; set policy='max_utilization', or "
            "leave host_cache_size (swap_space) out"
        )
    if size < page_bytes:
        raise ConfigError(
            f"{where} = {size} bytes is less than one page of {kv_cache.tokens_per_block} tokens "
            f"({page_bytes} bytes); raise it, or leave it out"
        )
    if free_bytes is not None and size > free_bytes:
        raise ConfigError(
            f"{where} = {size} bytes, {free_bytes} bytes of host memory are free; lower it"
        )
    return size // page_bytes


def _pages_behind(
    kv_cache: KvCacheConfig,
    scheduler: SchedulerConfig,
    window: int,
    sinks: int,
    length: int,
    step: int,
) -> int:
    """Pages whose memory the layers of a window hold at once, at most, in all requests: what each
    one's next row sees, and the rows of the steps that were not read yet."""
    page = kv_cache.tokens_per_block
    rows = max(scheduler.max_num_tokens or DEFAULT_MAX_NUM_TOKENS, scheduler.max_batch_size * step)
    if not scheduler.enable_chunked_prefill:
        rows = max(rows, length)
    each = pages_for(sinks, page) + pages_for(window + page - 1, page) + 1
    return scheduler.max_batch_size * each + (1 + scheduler.resolved_depth) * pages_for(rows, page)


def pages_in_window(
    kv_cache: KvCacheConfig, scheduler: SchedulerConfig, span: AttentionSpan, prompt: int, step: int
) -> int:
    """Pages that a text takes at once, at most, if rows see no more than `span`: of a prompt of so
    many tokens, in steps of so many rows. Without a window sys.maxsize."""
    if not span.window:
        return sys.maxsize
    rows = scheduler.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    return int(
        _core.pages_in_window(
            attention_window=span.window,
            sink_tokens=span.sink_tokens,
            page_size=kv_cache.tokens_per_block,
            max_num_tokens=rows if scheduler.enable_chunked_prefill else max(rows, prompt),
            overlap_depth=scheduler.resolved_depth,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            enable_block_reuse=kv_cache.enable_block_reuse,
            prompt=prompt,
            step=step,
        )
    )
