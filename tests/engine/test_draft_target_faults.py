"""Draft-target decoding where pages are few, a model gives NaN, or a request ends early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_target_cases import (
    CHAIN,
    GREEDY,
    PROMPTS,
    SAMPLED,
    TREE,
    VOCAB,
    open_llm,
    run,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from method_cases import HOST, Folders, Where, drafter_of, each_place, on_devices, pipeline_of
from test_graph_memory import EACH, Keeps

from specdec_ext import SamplingParams
from specdec_ext.engine.overlap import build as overlap_build
from specdec_ext.models.host_arrays import as_torch

STREAM = Where("stream", 1)


@each_place
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_fewer_pages_than_the_target_cost_drafts_alone(
    folders: Folders, plain: dict[str, Any], spec: dict[str, Any], where: Where
) -> None:
    cache, drafted = {"tokens_per_block": 4}, []
    n = len(PROMPTS) if where.device == "cpu" else 4
    for tokens in (None, 120, 72, 4):
        limits = {**spec, "max_kv_tokens": tokens}
        with open_llm(folders, "near", where=where, spec=limits, kv_cache_config=cache) as llm:
            assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
            metrics = llm.get_metrics()
        drafted.append(metrics["speculative_decoding"]["num_draft_tokens"])
        if tokens is not None:
            assert metrics["memory"]["draft_num_pages"] == tokens // 4
    assert drafted[0] >= drafted[1] >= drafted[2] > drafted[3]
    assert drafted[2] > 20 and drafted[3] < 10


@each_place
def test_steps_in_which_nobody_drafts_are_read_at_once(
    folders: Folders, plain: dict[str, Any], where: Where
) -> None:
    """So that the next draft fits, and is right."""
    spec = {**CHAIN, "draft_len_schedule": {1: 4, 2: 0}}
    with open_llm(folders, "target", where=where, spec=spec) as llm:
        lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (60, 20)]
        assert run(llm, PROMPTS[:2], lengths)[0][:40] == plain["greedy"][0]
        metrics = llm.get_metrics()
    counts = metrics["speculative_decoding"]
    assert metrics["executor"]["unspeculated_steps"] > 10
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 20


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_a_draft_models_nan_never_reaches_a_text(
    folders: Folders, plain: dict[str, Any], where: Where, value: str
) -> None:
    rejection = SamplingParams(
        max_tokens=40, ignore_eos=True, temperature=0.7, seed=3, acceptance="rejection"
    )
    with open_llm(folders, "near", where=where) as llm:
        model, calls = drafter_of(llm).model, 0
        forward = model.forward

        def poisoned(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            scores = forward(plan)
            if plan.needs_logits and calls % 2:
                scores[::2, calls % VOCAB] = float(value)
            return scores

        model.forward = poisoned
        assert run(llm, PROMPTS, SAMPLED) == plain["sampled"]
        run(llm, PROMPTS, rejection)


def test_nan_scores_end_the_draft(folders: Folders, plain: dict[str, Any]) -> None:
    with open_llm(folders, "near", spec={**CHAIN, "min_confidence": 0.01}) as llm:
        model = drafter_of(llm).model
        forward = model.forward

        def poisoned(plan: Any) -> Any:
            scores = forward(plan)
            if plan.needs_logits:  # not where it reads prompts
                scores[:, 3] = float("nan")
            return scores

        model.forward = poisoned
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        assert llm.get_metrics()["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_nan_in_the_draft_models_pages_never_reaches_a_text(
    folders: Folders, plain: dict[str, Any], share: float, where: Where
) -> None:
    """Whatever lies in a page that others have published, or that nobody wrote."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    with open_llm(folders, "near", where=where, kv_cache_config=cache) as llm:
        k_pages, v_pages = map(as_torch, drafter_of(llm).pages)
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        poisoned = torch.rand(k_pages.shape[1], generator=torch.Generator().manual_seed(1)) < share
        k_pages[:, poisoned] = v_pages[:, poisoned] = float("nan")
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        assert llm.get_metrics()["executor"]["reuse_hits"] >= 3


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_a_cancelled_request_returns_its_pages(
    folders: Folders, plain: dict[str, Any], where: Where
) -> None:
    with open_llm(folders, "near", where=where) as llm:
        groups = llm._submit_all([(None, p) for p in PROMPTS[:3]], GREEDY)
        for _ in range(4):
            llm.engine.step()
        groups[1].cancel()
        llm.engine.run([s for g in (groups[0], groups[2]) for s in g.states])
        for i in (0, 2):
            assert list(groups[i].snapshot().outputs[0].token_ids) == plain["greedy"][i]
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]


@on_devices
def test_graphs_are_measured_before_both_pools_are_sized(
    folders: Folders, plain: dict[str, Any], where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are recorded over a page of each model and dropped; those that are needed over the
    pools."""
    log: list[str] = []
    monkeypatch.setattr(overlap_build, "make_recorder", lambda *_: Keeps(log))
    with open_llm(folders, "near", where=where) as llm:
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        about = llm.get_metrics()
        buckets = pipeline_of(llm).buckets
    graphs = about["overlap"]["num_graphs"]
    every = 4 * len(buckets)  # with scores or without, with drafts or without
    assert 1 < graphs < every and log.count("record") == 4 + graphs
    assert about["memory"]["graph_bytes"] == EACH * every
