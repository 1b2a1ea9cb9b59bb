"""Draft lengths by the number of running requests: upper bounds, with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driver import hash_engine
from medusa_models import VOCAB, save_target
from test_synthetic_acceptance import METHODS, NAMES, configurations

from hash_target import HashFunction
from specdec_ext import LLM, SamplingParams, UserDrafterConfig

FUNCTION = HashFunction(vocab=24, surprise=5)
SCHEDULE = {1: 5, 3: 3, 5: 1, 7: 0}
MOST = {"lookahead": 31, "ngram": 5, "proposed": 127}


def limit_of(running: int, most: int) -> int:
    """{4: 8, 16: 2}: 8 for 1..4, 2 for 5..16, none above."""
    for batch in sorted(SCHEDULE):
        if running <= batch:
            return SCHEDULE[batch]
    return 0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_keeps_to_the_schedule(method: str, adaptive: bool) -> None:
    engine = hash_engine(
        FUNCTION, page_size=4, adaptive=adaptive, draft_len_schedule=list(SCHEDULE.items()),
        **METHODS[method],
    )  # fmt: skip
    engine.ex.set_step_cost([1, 128], [1.0, 1.0])  # rows are free: the bound decides
    prompts = [[1, 2, 3, 1, 2, 3, i] for i in range(9)]
    lengths = [20 + 25 * i for i in range(9)]
    rids = [engine.ex.submit(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    texts: dict[int, list[int]] = {rid: [] for rid in rids}
    most: dict[int, int] = {}  # drafts seen by limit
    shortened = unspeculated = 0
    while engine.ex.num_unfinished:
        if method == "proposed":
            for rid in rids:
                if engine.ex.decoding(rid):
                    engine.ex.propose(rid, [1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, 2, -1, 4, 5])
        running = 9 - sum(len(texts[r]) == n for r, n in zip(rids, lengths, strict=True))
        limit = limit_of(running, MOST[method])
        outputs = engine.step() or []
        decoded = any(not out.is_prefill for out in outputs)
        shortened += decoded and limit < MOST[method]
        unspeculated += decoded and limit == 0
        for out in outputs:
            texts[out.request_id] += out.tokens
            assert out.num_drafts <= limit
            most[limit] = max(most.get(limit, 0), out.num_drafts)
        after = 9 - sum(len(texts[r]) == n for r, n in zip(rids, lengths, strict=True))
        assert engine.ex.stats()["draft_len_limit"] == limit_of(after, MOST[method])
        assert engine.ex.draft_len_limit() == limit_of(after, MOST[method])
    assert most == {limit: limit for limit in SCHEDULE.values()}, "the bound is used"
    for rid, prompt, length in zip(rids, prompts, lengths, strict=True):
        assert texts[rid] == FUNCTION.reference(prompt, length)
    stats = engine.ex.stats()
    assert (stats["shortened_steps"], stats["unspeculated_steps"]) == (shortened, unspeculated)
    assert shortened > unspeculated > 0
    engine.assert_idle()


def test_without_a_schedule_nothing_is_counted() -> None:
    engine = hash_engine(FUNCTION, adaptive=False, **METHODS["ngram"])
    engine.ex.submit([1, 2, 1, 2], max_tokens=30)
    while engine.ex.num_unfinished:
        engine.step()
    stats = engine.ex.stats()
    assert stats["draft_len_limit"] == MOST["ngram"] == engine.ex.draft_len_limit()
    assert stats["shortened_steps"] == stats["unspeculated_steps"] == 0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [([(4, 2), (4, 1)], "ascending"), ([(0, 1)], "ascending"), ([(8, 1), (4, 2)], "ascending"),
     ([(4, 6)], r"\[4\] = 6: give 0..5"), ([(4, -1)], r"\[4\] = -1")],
)  # fmt: skip
def test_the_executor_refuses_bad_schedules(schedule: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hash_engine(FUNCTION, draft_len_schedule=schedule, **METHODS["ngram"])


# -- through LLM ----------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 1, 2, 3, i] for i in range(6)]
PARAMS = [SamplingParams(max_tokens=20 + 20 * i, ignore_eos=True) for i in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with LLM(target, speculative_config=None) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_max_concurrency_with_every_method(
    target: Path, plain: list[list[int]], tmp_path: Path, name: str
) -> None:
    """Plain decoding in the crowd, drafts for the last two; the text does not change."""
    config = configurations(target, tmp_path, max_concurrency=2, adaptive=False)[name]
    with LLM(target, speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        metrics = llm.get_metrics()
    assert [out.outputs[0].token_ids for out in outputs] == plain
    drafts = [o.metrics["speculative_decoding"]["num_draft_tokens"] for o in outputs]
    assert drafts[:4] == [0, 0, 0, 0]
    assert all(count > 0 for count in drafts[4:])
    stats = metrics["executor"]
    # The fourth request's 80 tokens come one by one.
    assert stats["unspeculated_steps"] == stats["shortened_steps"] >= 79
    assert stats["draft_len_limit"] == config.max_draft_len


class Recorder:
    """Notes the budgets that it was asked with."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def propose(self, history: list[int], budget: int) -> Any:
        self.budgets.append(budget)
        return [history[-1] % VOCAB] * budget


def test_a_drafter_is_asked_for_no_more_than_the_schedule_allows(
    target: Path, plain: list[list[int]]
) -> None:
    drafter = Recorder()
    config = UserDrafterConfig(drafter, 8, draft_len_schedule={1: 8, 2: 3, 4: 2})
    with LLM(target, speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.get_metrics()["drafter"]["refused_proposals"] == 0
    assert [out.outputs[0].token_ids for out in outputs] == plain
    # 6 and 5 requests: not asked at all; then 2 each, then 3 each, then 8.
    assert set(drafter.budgets) >= {2, 3, 8}
    first = {budget: drafter.budgets.index(budget) for budget in (2, 3, 8)}
    assert drafter.budgets[0] == 2 and first[2] < first[3] < first[8]
    assert all(budget <= 2 for budget in drafter.budgets[: first[3]])
