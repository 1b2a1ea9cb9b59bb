"""Rows of the last layer that no score depends on are left out: no bit of what is left changes.

The reference is the same step with the scores of all its rows, where nothing can be left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from test_decoder import FAMILIES, SMALL, Session, build_reference, prompt

from specdec_ext import _core

MASK_WORDS = 4
LAYERS = SMALL["num_hidden_layers"]


@dataclass(frozen=True)
class Rows:
    """A request's rows of a step: a chain, or a tree by its parents; those with scores."""

    kv_len: int
    count: int
    scored: tuple[int, ...]
    parents: tuple[int, ...] = ()


STEPS = {
    "a prompt": [Rows(0, 40, (39,))],
    "a part of a prompt": [Rows(8, 40, ())],
    "parts of two prompts": [Rows(0, 17, ()), Rows(12, 9, ())],
    "prompts and decoding": [Rows(0, 31, (30,)), Rows(20, 1, (0,)), Rows(3, 13, ()),
                             Rows(9, 1, (0,))],
    "the middle of a chain": [Rows(5, 30, (11, 13, 17)), Rows(0, 21, (0,))],
    "a tree behind a prompt": [Rows(0, 33, (32,)), Rows(11, 6, tuple(range(6)),
                                                        (-1, 0, 0, 1, 1, 2))],
    "scores of one row of a tree": [Rows(4, 22, ()), Rows(11, 5, (3,), (-1, 0, 0, 2, 1)),
                                    Rows(0, 12, (11,))],
    "a tree without scores": [Rows(7, 5, (), (-1, 0, 0, 1, 2)), Rows(0, 15, (14,))],
    "half of the rows": [Rows(0, 6, (3, 4, 5)), Rows(6, 2, (1,))],
    "more than half": [Rows(0, 6, (2, 3, 4, 5))],
}  # fmt: skip


def plan_of(session: Session, requests: list[Rows], *, all_scores: bool) -> _core.StepPlan:
    """The request's number is its slot of the session. Rows with scores are those asked for."""
    generator = random.Random(3)
    rows, logit_rows, cu_rows, cu_logits = 0, [], [0], [0]
    tokens, positions, parents = [], [], []
    mask = torch.zeros(sum(r.count for r in requests), MASK_WORDS, dtype=torch.int32)
    for request in requests:
        depth: list[int] = []
        for i in range(request.count):
            parent = request.parents[i] if request.parents else i - 1
            depth.append(0 if parent < 0 else depth[parent] + 1)
            if request.parents:
                mask[rows + i] = mask[rows + parent] if parent >= 0 else 0
                mask[rows + i, 0] |= 1 << i
            tokens.append(generator.randrange(session.vocab))
            positions.append(request.kv_len + depth[-1])
            parents.append(parent)
        logit_rows += [rows + i for i in (range(request.count) if all_scores else request.scored)]
        rows += request.count
        cu_rows.append(rows)
        cu_logits.append(len(logit_rows))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    plan = _core.StepPlan(
        max_requests=len(requests), max_rows=rows, max_pages_per_request=session.per_request
    )
    _core.fill_step_plan(
        plan, tokens=ints(tokens), positions=ints(positions), parents=ints(parents), mask=mask,
        cu_rows=ints(cu_rows), kv_len=ints([r.kv_len for r in requests]),
        is_tree=torch.tensor([bool(r.parents) for r in requests], dtype=torch.uint8),
        page_table=ints([session.pages[slot] for slot in range(len(requests))]),
        logit_rows=ints(logit_rows), cu_logits=ints(cu_logits), page_size=session.k.shape[3],
        num_pages=session.k.shape[1],
    )  # fmt: skip
    return plan


def session_before(model: torch.nn.Module, dtype: torch.dtype, requests: list[Rows]) -> Session:
    """With the tokens that the step's requests have behind them."""
    session = Session(model, dtype)
    for slot, request in enumerate(requests):
        if request.kv_len:
            session.step((slot, 0, prompt(request.kv_len, session.vocab, seed=slot + 20)))
    return session


def scored_rows(requests: list[Rows]) -> list[int]:
    rows, scored = 0, []
    for request in requests:
        scored += [rows + i for i in request.scored]
        rows += request.count
    return scored


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "llama-untied-bias"])
def test_scores_are_those_of_the_whole_step(family: str, dtype: torch.dtype, name: str) -> None:
    assert family in FAMILIES
    model, requests = build_reference(family, dtype), STEPS[name]
    whole, own = (session_before(model, dtype, requests) for _ in range(2))
    everything = torch.empty(sum(r.count for r in requests), whole.vocab)
    hidden = torch.empty(len(everything), SMALL["hidden_size"])
    whole.decoder.forward(plan_of(whole, requests, all_scores=True), everything, hidden)

    rows = scored_rows(requests)
    plan = plan_of(own, requests, all_scores=False)
    out, own_hidden = torch.empty(len(rows), own.vocab), torch.empty(len(rows), hidden.shape[1])
    own.decoder.forward(plan, out, own_hidden)
    assert torch.equal(out, everything[rows])
    assert torch.equal(own_hidden, hidden[rows])
    for pages, others in ((own.k, whole.k), (own.v, whole.v)):
        assert torch.equal(pages.view(torch.uint8), others.view(torch.uint8))

    ids = torch.empty(len(rows), dtype=torch.int32)
    own.decoder.forward(plan, ids)
    assert torch.equal(ids, everything[rows].argmax(-1).to(torch.int32))


@pytest.mark.parametrize("layers", [[LAYERS], [0, LAYERS - 1], [1, LAYERS]])
def test_a_tap_has_every_row(layers: list[int]) -> None:
    """What leaves the last layer is asked for of all rows; what enters it is there in any case."""
    requests = STEPS["prompts and decoding"]
    model = build_reference("llama", torch.float32)
    taps = []
    for all_scores in (True, False):
        session = session_before(model, torch.float32, requests)
        tapped = torch.full((160, len(layers) * SMALL["hidden_size"]), float("nan"))
        session.decoder.set_taps(layers, tapped)
        plan = plan_of(session, requests, all_scores=all_scores)
        session.decoder.forward(plan, torch.empty(plan.num_logit_rows, session.vocab))
        taps.append(tapped[: plan.num_rows])
    assert bool(taps[0].isfinite().all())
    assert torch.equal(*taps)
