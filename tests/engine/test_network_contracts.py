"""What every network that drafts owes, at every place and depth: a failure costs the drafts of its
step, and drafts come likeliest first, with an estimate that is never larger than the parent's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_cases import (
    COUNT,
    GREEDY,
    HOST,
    NETWORKS,
    WATCHED,
    Folders,
    Where,
    at_every_depth,
    check,
    drafter_of,
    each_place,
    methods,
    open_llm,
    prompts_for,
    texts_of,
)

from specdec_ext import SamplingParams

Plain = dict[str, list[list[int]]]


@at_every_depth
@methods(NETWORKS)
def test_a_drafter_that_raises_costs_drafts_alone(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    with open_llm(models, method, where) as llm:
        drafter, calls = drafter_of(llm), 0
        draft = drafter.draft

        def fails(inputs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                draft(inputs)  # it had done all of it
            if calls % 3 != 1:
                raise RuntimeError("no drafts today")
            draft(inputs)

        drafter.draft = fails
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        assert check(llm, failures=True)["num_draft_tokens"] > 20


def proposed(inputs: Any, slot: int) -> list[tuple[int, float]]:
    """(parent, estimate) of the drafts in a slot: cpp/algo/proposed_draft.h."""
    words = inputs.on_torch().slots[slot].view(torch.int32)
    block = words[len(words) - 384 :]  # len, count, 127 tokens, parents and estimates, padding
    if int(block[0]) != int(words[0]):
        return []
    count = int(block[1])
    parents = block[129 : 129 + count].tolist()
    return list(zip(parents, block[256 : 256 + count].view(torch.float32).tolist(), strict=True))


def trees_of(models: Folders, method: str, where: Where, params: Any, adaptive: bool) -> list[Any]:
    """What the drafter proposed in every step; its estimates are asked for."""
    seen: list[Any] = []
    with open_llm(models, method, where, scheduler=WATCHED) as llm:
        drafter = drafter_of(llm)
        if method in ("chain", "tree"):
            drafter.wants_survival = True
        draft, enter = drafter.draft, drafter.enter

        def watched(inputs: Any) -> None:
            draft(inputs)
            seen.extend(proposed(inputs, slot) for slot in inputs.slot_ids.tolist() if slot >= 0)

        def entered(slot: int, options: Any) -> None:  # no budget of the engine's is in the way
            enter(slot, {**options, "adaptive": adaptive} if options else options)

        drafter.draft, drafter.enter = watched, entered
        texts_of(llm, params, prompts_for(where))
        check(llm)
    return [tree for tree in seen if tree]


@each_place
@pytest.mark.parametrize("adaptive", [False, True])
@methods(NETWORKS)
def test_drafts_come_likeliest_first_with_their_estimates(
    models: Folders, method: str, where: Where, adaptive: bool
) -> None:
    trees = trees_of(models, method, where, GREEDY, adaptive)
    assert len(trees) > 10 and max(map(len, trees)) >= 4
    for tree in trees:
        for parent, estimate in tree:
            assert 0.0 <= estimate <= 1.0
            assert parent < 0 or estimate <= tree[parent][1]
        if method != "medusa" or adaptive:  # else in the order that was asked for
            estimates = [estimate for _, estimate in tree]
            assert estimates == sorted(estimates, reverse=True)
    assert len({estimate for tree in trees for _, estimate in tree}) > 4


def test_drawn_drafts_have_no_estimate(models: Folders) -> None:
    """What a draft turned out to be must not decide whether it is verified."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=2, acceptance="rejection")
    trees = trees_of(models, "chain", HOST, params, adaptive=False)
    estimates = [estimate for tree in trees for _, estimate in tree]
    assert len(estimates) > 50 and set(estimates) == {-1.0}
