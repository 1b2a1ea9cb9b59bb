"""Prefix reuse in steps that run ahead: text stays and pages come back."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Job
from engine_loop_cases import FUNCTION
from schedule_machine import METHODS
from stream_driver import StreamEngine, stream_hash_engine

DEPTHS = [0, 1, 2]


def idle(engine: StreamEngine) -> None:
    """Published pages count as free; forgotten, none is left."""
    engine.assert_idle()
    stats = engine.stats()
    assert engine.executor.reset_prefix_cache() == stats["cached_pages"]
    assert engine.stats()["cached_pages"] == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_second_request_computes_what_is_new(depth: int) -> None:
    engine = stream_hash_engine(
        FUNCTION, page_size=4, max_batch_size=2, max_seq_len=200, max_num_tokens=100, depth=depth,
        enable_block_reuse=True, **METHODS["lookahead"],
    )  # fmt: skip
    prompt = list(range(30))
    [first] = engine.run([Job(prompt, 20)])
    rows = engine.stats()["prefill_rows"]
    # All that was read before the last step's tokens is there, the answer too.
    longer = prompt + first.tokens[:12] + [7, 7]
    [second] = engine.run([Job(longer, 20)])
    assert second.tokens == FUNCTION.reference(longer, 20)
    stats = engine.stats()
    assert (rows, stats["reuse_hits"]) == (30, 1)
    assert stats["prefill_rows"] - rows == len(longer) - stats["cached_tokens"]
    assert stats["cached_tokens"] >= 36
    # Nobody shares across salts.
    [other] = engine.run([Job(longer, 20, {"cache_salt": "other"})])
    assert other.tokens == second.tokens
    assert engine.stats()["cached_tokens"] == stats["cached_tokens"]
    idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_equal_prompts_at_once_are_computed_once(depth: int) -> None:
    engine = stream_hash_engine(
        FUNCTION, page_size=4, max_batch_size=4, max_seq_len=200, max_num_tokens=200, depth=depth,
        stub=3, enable_block_reuse=True, **METHODS["ngram"],
    )  # fmt: skip
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    for d in engine.run([Job(prompt, 30) for _ in range(4)]):
        assert d.tokens == FUNCTION.reference(prompt, 30)
    assert engine.stats()["prefill_rows"] == 13 + 3 * 1
    idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_a_stop_string_cut_off_is_never_published(depth: int) -> None:
    """The caller cancels when it reads the text: of that step nothing is there to be found."""
    engine = stream_hash_engine(
        FUNCTION, page_size=1, max_batch_size=1, max_seq_len=200, max_num_tokens=200, depth=depth,
        enable_block_reuse=True, **METHODS["lookahead"],
    )  # fmt: skip
    prompt = [5, 6, 5, 6, 5, 6]
    rid = engine.submit(prompt, max_tokens=60)
    delivered: list[int] = []
    while len(delivered) < 20:
        last = 0
        for out in engine.step() or []:
            delivered += out.tokens
            last = len(out.tokens)
    assert engine.cancel(rid)
    engine.alive.discard(rid)
    engine.drain()
    stats: dict[str, Any] = engine.stats()
    assert stats["cached_pages"] == len(prompt) + len(delivered) - last
    idle(engine)
