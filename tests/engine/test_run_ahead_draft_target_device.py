"""Draft-target decoding in steps that run ahead on a device: in emulation everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_target_cases import CHAIN, GREEDY, PROMPTS, TREE
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from run_ahead_driver import FakeRecorder
from test_run_ahead_device import ENQUEUED, VIEWS
from test_run_ahead_draft_target import TREES, open_ahead, pipeline_of, run
from test_run_ahead_times import EACH, Keeps

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED, devices, needs_cuda
from specdec_ext import ConfigError
from specdec_ext.engine.overlap import build as overlap_build
from specdec_ext.engine.overlap import make_buckets

# Of the drafter: small integers of each request and row, and the laws of drawn drafts. None of them
# reads a value; what they make comes from the allocator's cache, or from a graph's pool.
DRAFTED = {
    "aten::__and__.Tensor", "aten::add.Tensor", "aten::amax", "aten::bitwise_and.Tensor",
    "aten::bitwise_not", "aten::cat", "aten::clamp_", "aten::clamp_max", "aten::clamp_min",
    "aten::cumsum.out", "aten::div.Tensor", "aten::eq.Scalar", "aten::exp", "aten::full_like",
    "aten::ge.Scalar", "aten::gt.Scalar", "aten::index_copy_", "aten::index_select",
    "aten::le.Scalar", "aten::logsumexp", "aten::lt.Scalar", "aten::masked_fill.Scalar",
    "aten::minimum", "aten::mul.Tensor", "aten::mul.out", "aten::ne.Scalar", "aten::new_full",
    "aten::remainder.Scalar", "aten::rsub.Scalar", "aten::searchsorted.Tensor", "aten::sub.Tensor",
    "aten::to.dtype", "aten::topk", "aten::unsqueeze", "aten::where.self", "aten::zeros_like",
}  # fmt: skip
LAWS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "acceptance": "rejection"}]


@devices
@pytest.mark.parametrize("draft", ["target", "near", "short"])
@pytest.mark.parametrize("depth", [0, 2])
def test_the_output_is_that_of_plain_decoding(
    folders: dict[str, Path], plain: dict[str, Any], device: str, draft: str, depth: int
) -> None:
    with open_ahead(folders, draft, depth, device=device) as llm:
        assert run(llm, PROMPTS[:6], GREEDY) == plain["greedy"][:6]
        counts = llm.get_metrics()["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] > 0
    if draft == "target":
        assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]


@devices
@pytest.mark.parametrize("draft", ["target", "near", "short"])
@pytest.mark.parametrize("spec", TREES[:3])
def test_trees_say_what_plain_decoding_says(
    folders: dict[str, Path], plain: dict[str, Any], device: str, draft: str, spec: dict[str, Any]
) -> None:
    """With nearly the CPU's drafts: shares that are as good as equal may stand in another order."""
    accepted = []
    for place in (device, "cpu"):
        with open_ahead(folders, draft, 2, spec=spec, device=place) as llm:
            assert run(llm, PROMPTS[:6], GREEDY) == plain["greedy"][:6]
            counts = llm.get_metrics()["speculative_decoding"]
        accepted.append(counts["num_accepted_draft_tokens"])
    assert accepted[0] > 0
    assert abs(accepted[0] - accepted[1]) <= 0.1 * accepted[1]


@devices
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_steps_wait_for_nothing_but_events(
    folders: dict[str, Path], device: str, law: dict[str, Any], spec: dict[str, Any]
) -> None:
    with open_ahead(folders, "near", 1, device=device, spec=spec) as llm:
        pipeline = pipeline_of(llm)
        run(llm, PROMPTS[:4], replace(GREEDY, **law))  # grows scratch memory
        for prompt in PROMPTS[:2]:
            pipeline.executor.submit(prompt, max_tokens=40, **law)
        assert pipeline.step() == []
        with no_synchronisation(device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(PROMPTS[2], max_tokens=3, **law)
                pipeline.step()
        pipeline.drain()
    assert seen.names - ENQUEUED - VIEWS <= DRAFTED


@devices
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("draft", "spec"), [("near", CHAIN), ("short", CHAIN), ("near", TREE)])
def test_padding_is_inert(
    folders: dict[str, Path], device: str, draft: str, spec: dict[str, Any], law: dict[str, Any]
) -> None:
    """Every bucket's operations, replayed with poisoned page tables of padding."""
    params = replace(GREEDY, seed=5, **law)
    with open_ahead(folders, draft, 1, spec=spec) as llm:
        wanted = run(llm, PROMPTS[:5], params)
    with open_ahead(folders, draft, 1, device=device, spec=spec) as llm:
        pipeline = pipeline_of(llm)
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 48)
        assert run(llm, PROMPTS[:5], params) == wanted
        assert recorder.recorded > 1
        assert recorder.replayed > 8


@pytest.mark.parametrize("device", [pytest.param("cuda-emu", marks=EMULATED)])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_every_access_of_a_padded_step_is_legal(
    folders: dict[str, Path], device: str, law: dict[str, Any], spec: dict[str, Any]
) -> None:
    """The emulation that checks bounds, races and initialisation."""
    params = replace(GREEDY, max_tokens=8, seed=5, **law)
    with open_ahead(folders, "near", 1, spec=spec) as llm:
        wanted = run(llm, PROMPTS[:3], params)
    with open_ahead(folders, "near", 1, 2, device=device, spec=spec) as llm:
        pipeline = pipeline_of(llm)
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(2, pipeline.executor.max_rows_per_request, 48)
        assert run(llm, PROMPTS[:3], params) == wanted


@devices
def test_steps_in_which_nobody_drafts_are_read_at_once(
    folders: dict[str, Path], plain: dict[str, Any], device: str
) -> None:
    """The draft model's first pass is part of every step, so that the next draft fits."""
    spec = {**CHAIN, "draft_len_schedule": {1: 4, 2: 0}}
    with open_ahead(folders, "target", 1, spec=spec, device=device) as llm:
        long = replace(GREEDY, max_tokens=60)
        outputs = llm.generate(PROMPTS[:2], [long, replace(GREEDY, max_tokens=20)], use_tqdm=False)
        assert outputs[0].outputs[0].token_ids[:40] == plain["greedy"][0]
        counts = llm.get_metrics()["speculative_decoding"]
        assert llm.get_metrics()["executor"]["unspeculated_steps"] > 10
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 20


@devices
def test_graphs_are_measured_before_both_pools_are_sized(
    folders: dict[str, Path], plain: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded over a page of each model, dropped, and recorded again over the pools."""
    log: list[str] = []
    monkeypatch.setattr(overlap_build, "make_recorder", lambda *_: Keeps(log))
    with open_ahead(folders, "near", 1, device=device) as llm:
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        about = llm.get_metrics()
    graphs = about["run_ahead"]["num_graphs"]
    assert graphs > 4 and log.count("record") == 2 * graphs
    assert about["memory"]["graph_bytes"] == EACH * graphs


@devices
def test_a_draft_model_of_the_adapter_is_refused(folders: dict[str, Path], device: str) -> None:
    spec = {**CHAIN, "model_impl": "transformers"}
    with pytest.raises(ConfigError, match="runs in the transformers adapter"):
        open_ahead(folders, "near", 1, spec=spec, device=device)


@needs_cuda
def test_graphs_say_the_same(folders: dict[str, Path], plain: dict[str, Any]) -> None:
    for law in LAWS:
        texts = []
        for eager in (True, False):
            with open_ahead(
                folders, "near", 2, device="cuda", scheduler={"enforce_eager": eager},
                dtype="float32",
            ) as llm:  # fmt: skip
                texts.append(run(llm, PROMPTS, replace(GREEDY, seed=5, **law)))
                assert bool(pipeline_of(llm)._replays) == (not eager)
        assert texts[0] == texts[1]
