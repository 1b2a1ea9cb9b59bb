"""Requests that learn by what steps brought choose their drafts together."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec_ext import LLM, SamplingParams, SuffixDecodingConfig, _core
from tiny_models import save_tiny


@pytest.mark.parametrize(
    ("requests", "seconds", "drafts"),
    [(1, 0.3, True), (1, 3.0, False), (4, 0.5, True), (8, 0.5, True), (4, 3.0, False)],
)
def test_what_drafting_costs_a_step_is_shared(requests: int, seconds: float, drafts: bool) -> None:
    """Rows are free. Among 4 or 8 requests half a step is too dear for the drafts of one alone: as
    long as nothing is known they are expected to bring some 1.2 tokens more."""
    pages = torch.zeros(1, 128, 1, 4, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=16, max_batch_size=requests, max_seq_len=32,
        max_num_tokens=256, method="proposed", proposed_max_draft_len=8, proposed_max_path=8,
    )  # fmt: skip
    executor.set_step_cost([1, 128], [1.0, 1.0])
    executor.set_draft_cost(seconds, 0.0)
    for _ in range(requests):
        executor.submit([1, 2, 3], max_tokens=20)
    plan = executor.plan()
    executor.commit(plan, torch.full((plan.num_logit_rows,), 4, dtype=torch.int32))
    staged = executor.stage()
    assert staged.num_decodes == requests
    assert (staged.max_decode_rows > requests) is drafts
    if drafts:  # not one of them alone
        assert staged.max_decode_rows >= 2 * requests


@pytest.mark.parametrize("adaptive", [True, False])
def test_drafts_of_fixed_length_have_no_price(adaptive: bool) -> None:
    """Nor do they need to know how likely they are, though T(rows) is known."""
    pages = torch.zeros(1, 16, 1, 4, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=16, max_batch_size=1, max_seq_len=32, max_num_tokens=64,
        method="proposed", proposed_max_draft_len=8, proposed_max_path=8, adaptive=adaptive,
    )  # fmt: skip
    executor.set_step_cost([1, 128], [0.5, 0.5])
    executor.submit([1, 2, 3], max_tokens=20)
    plan = executor.plan()
    executor.commit(plan, torch.full((plan.num_logit_rows,), 4, dtype=torch.int32))
    assert executor.stage().second_worth == (2.0 if adaptive else 0.0)


def test_how_many_drafts_are_expected_to_be_right() -> None:
    """Three drafts of prompt lookup behind a match of five tokens, before anything was seen: the
    first is taken to be right in 0.7 of all cases, a further one in 0.92 if the one above is."""
    pages = torch.zeros(1, 16, 1, 4, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=16, max_batch_size=1, max_seq_len=64, max_num_tokens=64,
        method="ngram", ngram={"max_draft_len": 3, "max_matching_ngram_size": 2}, adaptive=True,
    )  # fmt: skip
    executor.set_step_cost([1, 128], [1.0, 1.0])  # rows are free
    executor.submit([1, 2, 3, 4] * 8, max_tokens=20)
    plan = executor.plan()
    executor.commit(plan, torch.ones(plan.num_logit_rows, dtype=torch.int32))
    assert executor.stats()["expected_accepted_tokens"] == 0.0
    assert executor.plan().num_rows == 4
    expected = 0.7 + 0.7 * 0.92 + 0.7 * 0.92**2
    assert executor.stats()["expected_accepted_tokens"] == pytest.approx(expected)


def test_drafts_that_a_grammar_cuts_are_not_expected_to_be_right() -> None:
    pages = torch.zeros(1, 64, 1, 16, 1)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=64, max_batch_size=2, max_seq_len=256, max_num_tokens=128,
        method="suffix",
    )  # fmt: skip
    executor.set_step_cost([1, 128], [1.0, 1.0])  # rows are free
    request = executor.submit([1, 2, 3] * 8, max_tokens=100, grammar=True)
    for i in range(12):
        executor.stage()
        for tree in executor.draft():
            kept = 1 if i < 6 else 3
            executor.cut(request, [int(n < kept) for n in range(len(tree.tokens))])
        plan = executor.build()
        scores = torch.zeros(plan.num_logit_rows, 64)
        scores[:, 60] = 1.0
        executor.commit(plan, scores, masks={request: np.empty((0, 2), np.int32)})
        stats = executor.stats()
        if i == 5:
            assert stats["grammar_cut"] > 0 and stats["expected_accepted_tokens"] == 0.0
    assert stats["num_draft_tokens"] == 0 or stats["expected_accepted_tokens"] > 0.0


def test_who_was_preempted_reads_no_prompt_beside_others() -> None:
    """Rows beside prompts have their price, because prompts wait for them. Requests without pages
    wait for none: two that run draft as much beside four of them and more as they do alone."""
    rows, seconds = [1, 2, 4, 8, 16, 1024], [5.0, 6.0, 8.0, 12.0, 20.0, 1000.0]
    pages = torch.zeros(1, 120, 1, 4, 1)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=64, max_batch_size=8, max_seq_len=256, max_num_tokens=256,
        method="suffix", policy="max_utilization", check_integrity=True,
    )  # fmt: skip
    executor.set_step_cost(rows, seconds)

    def text(seed: int) -> list[int]:
        """It repeats itself with a difference now and then."""
        generator = random.Random(seed)
        tokens = [generator.randrange(60) for _ in range(12)]
        while len(tokens) < 256:
            same = generator.random() < 0.9
            tokens.append(tokens[-12] if same else generator.randrange(60))
        return tokens

    texts = {}
    for seed in range(8):
        request = executor.submit(text(seed)[:24], max_tokens=200, ignore_eos=True)
        texts[request] = text(seed)
    drafts: dict[bool, list[int]] = {False: [], True: []}  # beside four preempted ones and more
    while (plan := executor.plan()) is not None:
        preempted = executor.stats()["preempted"]
        owners = np.repeat(plan.request_ids, np.diff(plan.cu_rows)).tolist()
        positions = plan.positions.tolist()
        following = [texts[owners[r]][positions[r] + 1] for r in plan.logit_rows.tolist()]
        executor.commit(plan, torch.tensor(following, dtype=torch.int32))
        if plan.num_prefill_rows == 0 and plan.num_requests == 2:
            drafts[preempted >= 4].append(plan.num_rows - 2)
    assert min(map(len, drafts.values())) > 8
    alone, beside = (sum(d) / len(d) for d in drafts.values())
    assert alone > 3.0 and beside > 0.8 * alone


@pytest.mark.parametrize("first", [None, 0.0, 9.0])
def test_sampled_requests_teach_nothing_of_greedy_ones(tmp_path: Path, first: float | None) -> None:
    """How many drafts a greedy request has is the same behind hot ones, whose drafts fail, as in a
    new engine; but not behind greedy ones."""
    prompt = [5, 6, 7, 8] * 8

    def drafts_of(first: float | None) -> int:
        with LLM(save_tiny(tmp_path / "tiny"), speculative_config=config) as llm:
            llm.engine._calibrate = lambda: llm.engine.executor.set_step_cost([1, 128], [1.0, 12.0])
            if first is not None:
                seed = None if first == 0.0 else 7
                hot = SamplingParams(max_tokens=60, ignore_eos=True, temperature=first, seed=seed)
                llm.generate([prompt] * 4, hot, use_tqdm=False)
            before = llm.get_metrics()["executor"]["num_draft_tokens"]
            assert first is None or before > 0
            greedy = SamplingParams(max_tokens=60, ignore_eos=True)
            llm.generate([prompt], greedy, use_tqdm=False)
            return int(llm.get_metrics()["executor"]["num_draft_tokens"]) - before

    config = SuffixDecodingConfig(8, adaptive=True)
    new = drafts_of(None)
    assert (drafts_of(first) == new) is (first != 0.0)
