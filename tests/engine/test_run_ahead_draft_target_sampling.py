"""Sampled requests of a draft model that runs ahead: the target's law, and drafts that fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import CHAIN, PROMPTS, SAMPLED, TREE, VOCAB, open_llm, tokens_of
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from run_ahead_driver import FakeRecorder
from test_draft_target_sampling import check_law
from test_draft_target_sampling import small as small
from test_draft_target_vocabulary import reduced
from test_run_ahead_draft_target import DEPTHS, drafter_of, open_ahead, pipeline_of, run

from emulators import devices
from specdec_ext import SamplingParams
from specdec_ext.engine.overlap import make_buckets

pytestmark = pytest.mark.usefixtures("on_stream")

REJECTION = SamplingParams(
    max_tokens=40, ignore_eos=True, temperature=0.7, seed=3, acceptance="rejection"
)
# Every way to choose and to accept drafts, in one batch.
MIXED = [
    SamplingParams(max_tokens=40, ignore_eos=True, seed=i + 7, **law)
    for i, law in enumerate(
        [
            {},
            {"temperature": 0.8},
            {"temperature": 0.9, "acceptance": "rejection"},
            {"temperature": 0.9, "acceptance": "rejection", "use_draft_logits": False},
            {"temperature": 0.7, "top_p": 0.8, "acceptance": "rejection"},
            {"temperature": 0.7, "acceptance": "threshold", "acceptance_threshold": 0.2},
            {"temperature": 0.7, "acceptance": "typical"},
            {"temperature": 0.7, "speculative": False},
        ]
    )
]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("draft", "batch"), [("near", 3), ("target", 16), ("far", 1)])
def test_exact_match_says_what_plain_decoding_draws(
    folders: dict[str, Path], plain: dict[str, Any], draft: str, batch: int, depth: int
) -> None:
    n = 4 if batch == 1 else len(PROMPTS)
    with open_ahead(folders, draft, depth, batch) as llm:
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        counts = llm.get_metrics()["speculative_decoding"]
    if draft == "target":  # drawn with the number that the target draws with
        assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_drawn_draft_of_the_targets_own_law_is_always_accepted(
    folders: dict[str, Path], depth: int
) -> None:
    with open_ahead(folders, "target", depth) as llm:
        run(llm, PROMPTS, REJECTION)
        counts = llm.get_metrics()["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 400


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 6}, {"top_p": 0.7, "min_p": 0.05}])
def test_drawn_drafts_are_those_of_the_host(
    folders: dict[str, Path], depth: int, cuts: dict[str, Any]
) -> None:
    """The same numbers draw them from the same law, cuts included, so the same are accepted: the
    text is the host's."""
    params = replace(REJECTION, **cuts)
    with open_llm(folders, "near") as llm:
        wanted = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
        drafted = llm.get_metrics()["speculative_decoding"]
    with open_ahead(folders, "near", depth) as llm:
        assert run(llm, PROMPTS, params) == wanted
        counts = llm.get_metrics()["speculative_decoding"]
    for key in ("num_draft_tokens", "num_accepted_draft_tokens"):
        assert counts[key] == drafted[key] > 200


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (CHAIN, {"acceptance": "rejection"}),
        ({"max_draft_len": 4}, {"acceptance": "rejection"}),
        ({**CHAIN, "min_confidence": 0.3}, {"acceptance": "rejection"}),
        (CHAIN, {"acceptance": "rejection", "use_draft_logits": False}),
        (TREE, {"acceptance": "rejection"}),
        (CHAIN, {}),
    ],
    ids=["q", "adaptive", "min-confidence", "one-hot", "tree", "exact-match"],
)
def test_the_output_has_the_targets_law(
    small: dict[str, Path], spec: dict[str, Any], options: dict[str, Any]
) -> None:
    check_law(small, spec, options, draws=5000, run_ahead=1)


def test_the_output_of_a_reduced_head_has_the_targets_law(
    small: dict[str, Path], tmp_path: Path
) -> None:
    folders = {**small, "draft": reduced(small, tmp_path / "draft", [4, 0, 3], tied=False)}
    check_law(folders, {**CHAIN}, {"acceptance": "rejection"}, draws=5000, run_ahead=1)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40, ignore_eos=True), SAMPLED])
def test_a_reduced_head_drafts_its_tokens_alone(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, params: SamplingParams
) -> None:
    """The target as its own draft model: right wherever the token is one that it may draft."""
    path = reduced(folders, tmp_path / "draft", list(range(0, VOCAB, 2)), tied=False)
    wanted = plain["sampled" if params is SAMPLED else "greedy"]
    with open_ahead({**folders, "half": path}, "half", 1) as llm:
        assert run(llm, PROMPTS, params) == wanted
        accepted = llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 40


def mixed(llm: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[:8], MIXED, use_tqdm=False)
    assert llm.get_metrics()["drafter"]["failures"] == 0
    return tokens_of(outputs)


@pytest.mark.parametrize("batch", [1, 8])
def test_requests_of_every_rule_do_not_depend_on_depth_or_company(
    folders: dict[str, Path], batch: int
) -> None:
    texts = []
    for depth in DEPTHS:
        with open_ahead(folders, "near", depth, batch) as llm:
            texts.append(mixed(llm))
            counts = llm.get_metrics()["speculative_decoding"]
            assert counts["num_accepted_draft_tokens"] > 40
    with open_ahead(folders, "near", 1, 3) as llm:
        pipeline = pipeline_of(llm)
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 1024)
        texts.append(mixed(llm))
        assert recorder.replayed > 20
    assert texts.count(texts[0]) == len(texts)


@devices
def test_a_device_draws_what_the_cpu_draws(folders: dict[str, Path], device: str) -> None:
    texts = []
    for place in ("cpu", device):
        with open_ahead(folders, "near", 1, 3, device=place) as llm:
            texts.append(mixed(llm))
    assert texts[0] == texts[1]


def test_min_confidence_ends_a_chain_behind_an_unsure_draft(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    drafted = []  # a step
    for floor in (0.0, 0.1, 1.0):
        with open_ahead(folders, "near", 1, spec={**CHAIN, "min_confidence": floor}) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            counts = llm.get_metrics()["speculative_decoding"]
        steps = sum(out.metrics["num_forward_passes"] - 1 for out in outputs)
        drafted.append(counts["num_draft_tokens"] / steps)
    assert 4 >= drafted[0] > drafted[1] > drafted[2]
    assert 0.9 < drafted[2] <= 1


def test_a_draft_models_nan_never_reaches_a_sampled_text(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    with open_ahead(folders, "near", 1) as llm:
        forward, calls = drafter_of(llm).model.forward, 0

        def poisoned(step_plan: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            scores: torch.Tensor = forward(step_plan)
            if step_plan.needs_logits and calls % 2:
                scores[::2, calls % VOCAB] = float("nan" if calls % 4 == 1 else "inf")
            return scores

        drafter_of(llm).model.forward = poisoned
        assert run(llm, PROMPTS, SAMPLED) == plain["sampled"]
        run(llm, PROMPTS, REJECTION)
