"""The law that weighs copies to the host against computing K/V again, and its configuration."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

from reference.swap_reference import reading_seconds
from reference.swap_reference import swapping_pays as pays_by_definition
from specdec_ext import LLM, ConfigError, KvCacheConfig, SchedulerConfig, _core, _core_testing
from specdec_ext.cli.common import SpecdecParser, add_llm_arguments, llm_kwargs
from specdec_ext.config.build_check import with_swap_space
from specdec_ext.config.parse import parse_kv_cache_config
from specdec_ext.engine.memory_plan import MemoryPlan, plan_memory
from specdec_ext.text.metrics import describe_preemptions


def test_the_law_against_its_definition() -> None:
    rng = random.Random(4)
    found = {True: 0, False: 0}
    for _ in range(250):
        counts = [1, *sorted(rng.sample(range(2, 600), rng.randrange(1, 7)))]
        times = sorted(rng.randrange(1, 2**20) for _ in counts)
        grown = sorted(rng.randrange(2**10) for _ in counts) if rng.random() < 0.5 else []
        context, scale = rng.choice([0, 64, 512]), (rng.choice([1, 2]), rng.choice([1, 3]))
        unit = Fraction(1, 2**22)  # all of it is exact in doubles
        cost = _core.StepCost(
            {c: float(t * unit) for c, t in zip(counts, times, strict=True)},
            {c: float(g * unit / 1024) for c, g in zip(counts, grown, strict=False)},
            context_len=context,
            prefill=(float(scale[0]), float(scale[1])),
        )
        start, length = rng.randrange(2000), rng.randrange(1, 2000)
        chunk = rng.choice([1, 16, 100, 1024])
        reading = reading_seconds(
            [(c, t * unit) for c, t in zip(counts, times, strict=True)],
            [(c, g * unit / 1024) for c, g in zip(counts, grown, strict=False)],
            context, (Fraction(scale[0]), Fraction(scale[1])), start, start + length, chunk,
        )  # fmt: skip
        assert _core_testing.seconds_to_read(
            cost.columns, start, start + length, chunk
        ) == pytest.approx(float(reading), rel=1e-9)
        pages, page_bytes = rng.randrange(1, 100), rng.randrange(1, 2**20)
        exact = 2 * pages * page_bytes / reading  # bytes in a second at which both take as long
        for factor in (Fraction(1, 3), 1 - Fraction(1, 10**6), 1 + Fraction(1, 10**6), 3):
            speed = int(exact * factor) + 1
            if abs(speed / exact - 1) < Fraction(1, 10**8):
                continue
            expected = pays_by_definition(pages * page_bytes, speed, reading)
            found[expected] += 1
            assert expected == _core_testing.swapping_pays(
                cost.columns, pages=pages, page_bytes=page_bytes, bytes_per_second=float(speed),
                start=start, end=start + length, chunk=chunk,
            )  # fmt: skip
    assert min(found.values()) > 100


def test_what_is_not_known_is_copied() -> None:
    table = _core.StepCost({1: 1.0, 2: 1.0}).columns
    one: dict[str, Any] = {"pages": 1, "page_bytes": 10**9, "start": 0, "end": 1, "chunk": 8}
    assert _core_testing.swapping_pays(None, bytes_per_second=1.0, **one)
    assert _core_testing.swapping_pays(table, bytes_per_second=0.0, **one)
    assert not _core_testing.swapping_pays(table, bytes_per_second=1.0, **one)


def plan(
    page: int = 4, policy: str = "max_utilization", free: int = 10**9, **cache: Any
) -> MemoryPlan:
    return plan_memory(
        bytes_per_token=100,
        max_position=64,
        draft_len=0,
        kv_cache=KvCacheConfig(tokens_per_block=page, **cache),
        scheduler=SchedulerConfig(policy=policy),
        free_bytes=10**9,
        host_free_bytes=free,
    )


def test_the_pool_has_whole_pages() -> None:
    assert (plan().host_num_pages, plan().host_page_bytes) == (0, 0)
    found = plan(host_cache_size=1999)
    assert (found.host_num_pages, found.host_page_bytes) == (4, 400)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"host_cache_size": 4000, "policy": "guaranteed_no_evict"},
         "host_cache_size = 4000 with SchedulerConfig.policy = 'guaranteed_no_evict'"),
        ({"host_cache_size": 399}, "399 bytes is less than one page of 4 tokens .400 bytes"),
        ({"host_cache_size": 4000, "free": 3999}, "4000 bytes, 3999 bytes of host memory are free"),
    ],
)  # fmt: skip
def test_what_can_never_be_used_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**how)


def test_spellings() -> None:
    assert parse_kv_cache_config({"swap_space": 0.5}).host_cache_size == 2**29
    assert KvCacheConfig(swap_space=4).host_cache_size == 2**32  # type: ignore[call-arg]
    assert KvCacheConfig().host_cache_size == 0
    with pytest.raises(ConfigError, match="host_cache_size is given twice"):
        KvCacheConfig(swap_space=1, host_cache_size=1)  # type: ignore[call-arg]


def test_llm_takes_it_directly() -> None:
    """LLM(swap_space=...), as vLLM spells it."""
    given = KvCacheConfig(tokens_per_block=16)
    assert with_swap_space(given, None) is given
    assert with_swap_space(given, 0.25) == KvCacheConfig(tokens_per_block=16, host_cache_size=2**28)
    same = KvCacheConfig(host_cache_size=2**30)
    assert with_swap_space(same, 1) == same
    sizes = r"^swap_space = 2 GiB \(2147483648 bytes\) .*host_cache_size = 1073741824; .*give one"
    with pytest.raises(ConfigError, match=sizes):
        with_swap_space(same, 2)
    for value in (-1, "4", float("inf")):
        with pytest.raises(ConfigError, match=r"^swap_space = .*number of GiB"):
            LLM("/nowhere", swap_space=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="they are two names of one size"):
        LLM("/nowhere", swap_space=2, kv_cache_config=same)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_cache_size", -1), ("host_cache_size", 1.5), ("host_cache_size", "1G"),
        ("host_cache_size", True), ("swap_space", -0.1), ("swap_space", float("nan")),
        ("swap_space", "4"), ("host_link_gb_per_s", 0.0), ("host_link_gb_per_s", float("inf")),
        ("host_link_gb_per_s", -1.0),
    ],
)  # fmt: skip
def test_bad_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"KvCacheConfig\.{name} = "):
        KvCacheConfig(**{name: value})


def test_copies_of_pages_check_their_orders() -> None:
    import numpy as np

    pages = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    copies = np.zeros((5, 2, 4), dtype=np.float32)
    pools = _core.PagePools([(pages, copies)])
    was = pages.copy()
    pools.follow(np.array([[1, 2, 4], [1, 0, 1]], dtype=np.int32))
    assert (copies[4] == was[:, 2]).all()
    assert (copies[1] == was[:, 0]).all()
    pages[:] = -1
    pools.follow(np.array([[0, 1, 4], [0, 7, 1]], dtype=np.int32))  # there is no page 7: left out
    assert (pages[:, 1] == was[:, 2]).all()
    assert (pages[:, [0, 2]] == -1).all()
    for order in ([0, -1, 0], [0, 0, -1], [1, 0, 5]):
        with pytest.raises(ValueError, match="pages are not negative, those of the host's pool"):
            pools.follow(np.array([order], dtype=np.int32))
    with pytest.raises(ValueError, match=r"shape must be \[N, 3\]"):
        pools.follow(np.zeros((1, 2), dtype=np.int32))
    with pytest.raises(ValueError, match="no whole number of pages"):
        _core.PagePools([(pages, np.zeros((5, 2, 7), dtype=np.float32))])
    with pytest.raises(ValueError, match="of the pages' dtype"):
        _core.PagePools([(pages, np.zeros((5, 2, 4), dtype=np.float16))])
    with pytest.raises(ValueError, match="copies for 4 and for 5 pages"):
        _core.PagePools([(pages, copies), (pages, np.zeros((4, 2, 4), dtype=np.float32))])


def test_what_statistics_say() -> None:
    stats = {
        "preemptions": 3, "recomputed_tokens": 40, "host_total_pages": 0, "host_pool_full": 0,
        "swapped_out": 0, "swapped_in": 0, "swapped_out_bytes": 0, "swapped_in_bytes": 0,
    }  # fmt: skip
    assert describe_preemptions({"preemptions": 0}) is None
    assert describe_preemptions(stats) == "preemptions: 3, 40 tokens read again"
    stats |= {"host_total_pages": 9, "swapped_out": 2, "swapped_out_bytes": 2_500_000}
    stats |= {"swapped_in": 1, "swapped_in_bytes": 1_200_000, "host_pool_full": 1}
    assert describe_preemptions(stats) == (
        "preemptions: 3, 40 tokens read again; 2 swapped to the host (2.5 MB), 1 back (1.2 MB), "
        "1 found no room there"
    )


@pytest.mark.parametrize(
    ("arguments", "size"),
    [([], 0), (["--host-cache-size", "1000"], 1000), (["--swap-space", "0.5"], 2**29)],
)
def test_the_command_line(arguments: list[str], size: int) -> None:
    parser = SpecdecParser()
    add_llm_arguments(parser)
    assert llm_kwargs(parser.parse_args(arguments))["kv_cache_config"].host_cache_size == size
