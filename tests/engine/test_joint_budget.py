"""Requests that learn by what steps brought choose their drafts together."""

from __future__ import annotations

import pytest
import torch

from specdec_ext import _core


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
