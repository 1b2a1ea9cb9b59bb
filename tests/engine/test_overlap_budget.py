"""Draft budgets that follow results which arrive late: the text stays, what pays is drafted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from driver import Job
from schedule_machine import METHODS
from stream_driver import stream_hash_engine

from hash_target import HashFunction

DRAFTING = ["lookahead", "lookahead-7", "ngram"]
FREE = ([1, 128], [1.0, 1.0])
DEAR = ([1, 128], [1.0, 60.0])
SIZES = {"max_seq_len": 200, "max_num_tokens": 300}


def drafts_of(
    method: str, cost: Any, *, depth: int = 1, surprise: int = 8, tokens: int = 150, **options: Any
) -> tuple[int, int]:
    """(drafts verified, steps) of one text; surprise 1: no draft is ever right."""
    function = HashFunction(vocab=30, surprise=surprise, alphabet=4, seed=3)
    engine = stream_hash_engine(
        function, max_batch_size=2, depth=depth, stub=5, **SIZES, **METHODS[method], **options
    )
    engine.executor.set_step_cost(*cost)
    job = Job([1, 2, 3, 1, 2], tokens, {"seed": 7})
    [got] = engine.run([job])
    assert got.tokens == function.reference(job.prompt, tokens)
    return got.num_drafts, got.forwards


@pytest.mark.parametrize("pads_rows", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("method", DRAFTING)
def test_free_rows_are_used_and_dear_ones_are_not(method: str, depth: int, pads_rows: bool) -> None:
    options: dict[str, Any] = {"depth": depth, "pads_rows": pads_rows}
    _, least = drafts_of(method, FREE, adaptive=False, **options)
    drafts, steps = drafts_of(method, FREE, **options)
    assert drafts > 0
    assert steps <= 1.15 * least
    drafts, _ = drafts_of(method, DEAR, surprise=1, **options)
    always, _ = drafts_of(method, DEAR, surprise=1, adaptive=False, **options)
    assert drafts < 0.3 * always


@pytest.mark.parametrize("method", ["lookahead", "ngram"])
def test_drafts_recover_when_the_text_changes(method: str) -> None:
    """Nothing is right for long, then everything: the budget is off, asks, and comes back."""
    turn, tokens = 700, 1100
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=3)
    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=2000, max_num_tokens=300, depth=2, **METHODS[method]
    )
    engine.executor.set_step_cost([1, 128], [1.0, 8.0])
    forward = engine.model.forward
    rng = random.Random(1)
    noise = [rng.randrange(30) for _ in range(turn)]

    def turning(plan: Any) -> Any:
        """Any tokens up to position `turn`, a loop of four behind it."""
        ids = forward(plan)
        for i, row in enumerate(plan.logit_rows.tolist()):
            at = int(plan.positions[row])
            ids[i] = at % 4 if at >= turn else noise[at]
        return ids

    engine.model.forward = turning
    rid = engine.submit([1, 2, 3], max_tokens=tokens)
    lengths: list[tuple[int, int]] = []  # tokens so far, drafts
    known = 0
    while (outputs := engine.step()) is not None:
        for out in outputs:
            assert out.request_id == rid
            known += len(out.tokens)
            lengths.append((known, out.num_drafts))
    before = [n for at, n in lengths if at < turn]
    after = [n for at, n in lengths if at > turn + 200]
    assert sum(before[-200:]) < 200
    assert sum(after) / len(after) > 1
    engine.assert_idle()
