"""Sizes of the KV pool and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_ext.config.engine import KvCacheConfig, SchedulerConfig
from specdec_ext.engine.memory_plan import (
    CPU_POOL_LIMIT_BYTES,
    MemoryPlan,
    available_memory_bytes,
    plan_memory,
)
from specdec_ext.errors import ConfigError


def plan(kv: KvCacheConfig | None = None, sched: SchedulerConfig | None = None,
         **changes: Any) -> MemoryPlan:  # fmt: skip
    model: dict[str, Any] = {
        "bytes_per_token": 2 * 30 * 3 * 64 * 2, "max_position": 8192,
        "draft_len": 10, "free_bytes": 64 << 30,
    }  # fmt: skip
    model.update(changes)
    return plan_memory(
        **model, kv_cache=kv or KvCacheConfig(), scheduler=sched or SchedulerConfig()
    )


def test_default_is_limited_on_cpu() -> None:
    memory = plan()
    assert memory.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert memory.pool_bytes <= CPU_POOL_LIMIT_BYTES
    assert memory.pool_bytes > CPU_POOL_LIMIT_BYTES - 32 * memory.bytes_per_token
    assert memory.max_seq_len == 8192
    assert "4 GiB" in memory.limited_by


def test_a_gpus_pages_are_limited_by_its_memory_alone() -> None:
    memory = plan(pool_limit_bytes=None)
    assert memory.limited_by == "max_batch_size x max_seq_len"
    assert memory.pool_bytes > CPU_POOL_LIMIT_BYTES
    memory = plan(pool_limit_bytes=None, free_bytes=4 << 30)
    assert memory.pool_bytes == pytest.approx(0.9 * (4 << 30), rel=0.001)
    assert memory.limited_by.startswith("free_gpu_memory_fraction = 0.9 of ")


def test_small_batches_get_what_they_need() -> None:
    memory = plan(sched=SchedulerConfig(max_batch_size=2, max_seq_len=100))
    assert memory.num_pages == 2 * 4  # 110 slots of a sequence are 4 pages
    assert memory.max_seq_len == 100


def test_max_tokens_rounds_up_to_pages_and_limits_the_length() -> None:
    memory = plan(KvCacheConfig(max_tokens=100))
    assert (memory.num_pages, memory.pool_tokens) == (4, 128)
    assert memory.max_seq_len == 118  # room for the drafts of the last step
    explicit = plan(KvCacheConfig(max_tokens=100), SchedulerConfig(max_seq_len=500))
    assert explicit.max_seq_len == 500  # requests that do not fit are refused one by one


def test_little_memory() -> None:
    memory = plan(free_bytes=100 << 20)
    assert memory.pool_bytes <= 90 << 20
    assert "free_gpu_memory_fraction" in memory.limited_by
    assert memory.max_seq_len == memory.pool_tokens - 10
    with pytest.raises(ConfigError, match="cannot hold"):
        plan(free_bytes=1000)


def test_layers_that_hold_a_window_leave_room_for_more_pages() -> None:
    """Five of six layers see 512 tokens: of a long pool they take a bounded part."""
    sched = SchedulerConfig(max_batch_size=4, max_num_tokens=256)
    whole = plan(sched=sched, free_bytes=120 << 20)
    narrow = [512, 512, 512, 512, 512, 0] * 5
    memory = plan(sched=sched, free_bytes=120 << 20, narrow=narrow, narrow_sinks=3)
    limit, layer = 0.9 * (120 << 20), 32 * memory.bytes_per_token // 30
    # By hand: a page of sinks, 17 that a row sees, one that is begun; the rows of one step, or of
    # two where one is read late.
    most = 4 * (1 + 17 + 1) + (1 + sched.resolved_depth) * 8

    def bytes_of(pages: int) -> int:
        return pages * 5 * layer + min(pages, most) * 25 * layer

    assert memory.pool_bytes == bytes_of(memory.num_pages) <= limit
    assert bytes_of(memory.num_pages + 1) > limit
    assert memory.num_pages > 2.5 * whole.num_pages
    assert memory.narrow_windows == tuple(narrow) and memory.narrow_sink_tokens == 3
    # A pool that is smaller than what they hold at once takes all of each page.
    small = plan(KvCacheConfig(max_tokens=640), sched, narrow=narrow)
    assert small.pool_bytes == 20 * 30 * layer


@pytest.mark.parametrize(("kv", "sched", "message"), [
    (None, SchedulerConfig(max_seq_len=8193), "8193.*8192"),
    (KvCacheConfig(max_tokens=10**9), None, "max_tokens = 1000000000 needs"),
    (KvCacheConfig(max_tokens=4, tokens_per_block=4), None, "at least 12"),
    (None, SchedulerConfig(max_num_tokens=10, max_batch_size=4), "10 is less than the 11"),
    (None, SchedulerConfig(max_num_tokens=16, max_batch_size=32), "16.*32"),
])  # fmt: skip
def test_refusals(kv: KvCacheConfig | None, sched: SchedulerConfig | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(kv, sched)


def test_rows_of_a_step() -> None:
    assert plan().max_num_tokens == 1024
    assert plan(draft_len=127).max_num_tokens == 32 * 128
    whole = SchedulerConfig(enable_chunked_prefill=False, max_batch_size=1)
    assert plan(sched=whole).max_num_tokens == 8192


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50
