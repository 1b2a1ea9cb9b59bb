"""Draft-target decoding in steps that run ahead: the target's text, at every depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import (
    CHAIN,
    DRAFTS,
    GREEDY,
    PROMPTS,
    TREE,
    VOCAB,
    gathered,
    open_llm,
    rebuilt,
    tokens_of,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from run_ahead_driver import FakeRecorder

from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.cli import main
from specdec_ext.drafters import DraftInputs
from specdec_ext.engine.overlap import make_buckets
from specdec_ext.models import load_model

pytestmark = pytest.mark.usefixtures("on_stream")

DEPTHS = [0, 1, 2]
TREES: list[dict[str, Any]] = [
    TREE,
    {"max_draft_len": 6, "top_k": 2, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 30, "top_k": 4, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 12, "top_k": 12, "max_draft_depth": 1, "adaptive": False},
]


def open_ahead(folders: dict[str, Path], draft: str, depth: int, batch: int = 3, **kw: Any) -> LLM:
    scheduler = {"run_ahead": depth, **kw.pop("scheduler", {})}
    return open_llm(folders, draft, batch, scheduler=scheduler, **kw)


def pipeline_of(llm: LLM) -> Any:
    return llm.engine._pipeline  # type: ignore[attr-defined]


def drafter_of(llm: LLM) -> Any:
    return pipeline_of(llm).drafter


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """The tokens; pages are back, and the drafter never raised."""
    tokens = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    metrics = llm.get_metrics()
    assert metrics["drafter"]["failures"] == 0
    stats = metrics["executor"]
    assert stats["free_pages"] == stats["total_pages"]
    return tokens


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("draft", "batch", "spec"), [
    *[(draft, 16, CHAIN) for draft in DRAFTS],
    *[(draft, 3, CHAIN) for draft in DRAFTS],
    *[(draft, 1, CHAIN) for draft in ("near", "short")],
    *[(draft, 3, {}) for draft in ("target", "near", "far")],
    ("near", 3, {**CHAIN, "max_draft_len": 1}),
    ("near", 3, {**CHAIN, "max_draft_len": 9}),
])  # fmt: skip
def test_the_output_is_that_of_plain_decoding(
    folders: dict[str, Path],
    plain: dict[str, Any],
    draft: str,
    batch: int,
    spec: dict[str, Any],
    depth: int,
) -> None:
    n = 4 if batch == 1 else len(PROMPTS)
    with open_ahead(folders, draft, depth, batch, spec=spec) as llm:
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert llm.get_metrics()["memory"]["draft_num_pages"] == llm.memory.num_pages


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_target_and_draft_may_differ_in_type_and_implementation(
    folders: dict[str, Path], dtype: str, impl: str
) -> None:
    with open_llm(folders, None, dtype="bfloat16") as llm:
        wanted = tokens_of(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False))
    spec = {**CHAIN, "dtype": dtype, "model_impl": impl}
    with open_ahead(folders, "target", 1, spec=spec, dtype="bfloat16") as llm:
        assert run(llm, PROMPTS[:4], GREEDY) == wanted
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 50


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_draft_model_equal_to_the_target_is_right_every_time(
    folders: dict[str, Path], plain: dict[str, Any], depth: int, length: int
) -> None:
    spec = {**CHAIN, "max_draft_len": length}
    with open_ahead(folders, "target", depth, spec=spec) as llm:
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        metrics = llm.get_metrics()
        counts = metrics["speculative_decoding"]
        assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]
        steps = -(-39 // (length + 1))  # the first token comes from the prompt's own pass
        assert counts["num_draft_tokens"] == len(PROMPTS) * (39 - steps)
        # Every prompt once, every token once, and the padding of no pass.
        assert metrics["drafter"]["rows"] <= sum(map(len, PROMPTS)) + 39 * len(PROMPTS)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("page", [1, 4, 32])
@pytest.mark.parametrize("draft", ["target", "near", "far"])
def test_in_every_round_the_kv_is_that_of_the_text_read_afresh(
    folders: dict[str, Path], plain: dict[str, Any], draft: str, page: int, every: int
) -> None:
    """Bit for bit in front of what a round reads, after partial and after full acceptance, and
    where only every third step drafts."""
    with open_ahead(folders, draft, 1, kv_cache_config={"tokens_per_block": page}) as llm:
        drafter = drafter_of(llm)
        scratch = load_model(folders[draft], draft=True)
        missing: list[int] = []
        passes = drafter.side.passes

        class Checked:
            def __getattr__(self, name: str) -> Any:
                return getattr(passes, name)

            def begin(self, layout: Any, slots: Any, ids: Any, drafts: Any, *rest: Any) -> None:
                passes.begin(layout, slots, ids, drafts, *rest)
                for b, slot in enumerate(ids.tolist()):
                    words = slots[slot].view(torch.int32)
                    length, begun, finish = words[:3].tolist()  # of a Slot
                    if not begun or finish or int(drafts[b]) == 0:
                        continue
                    begin, end = layout.history_offset // 4, passes.num_read(slot)
                    text = words[begin : begin + length].tolist()
                    missing.append(length - end)
                    mine = gathered(*drafter.pages, rest[0][b].tolist(), end)
                    fresh = rebuilt(scratch, text[:end], page)
                    assert torch.equal(mine[0], fresh[0])
                    assert torch.equal(mine[1], fresh[1])

        drafter.side.passes = Checked()
        draft_now, steps = drafter.draft, 0

        def sometimes(inputs: DraftInputs) -> None:
            nonlocal steps
            steps += 1
            if steps % every == 0:
                draft_now(inputs)

        drafter.draft = sometimes
        assert run(llm, PROMPTS[:6], GREEDY) == plain["greedy"][:6]
    # The golden token; after full acceptance the last draft, too.
    if every == 1:
        assert set(missing) <= {1, 2}
    assert len(missing) > 15
    if draft != "far":
        assert missing.count(2 if every == 1 else 4) > 1


@pytest.mark.parametrize("most", [200, 8])
def test_tokens_of_steps_without_drafts_are_read_later(
    folders: dict[str, Path], plain: dict[str, Any], most: int
) -> None:
    """In one pass, or in pieces of as many rows as fit."""
    with open_ahead(folders, "target", 1, 1) as llm:
        drafter, calls, rows = drafter_of(llm), 0, []
        draft, forward = drafter.draft, drafter.model.forward
        sizes = {"vocab_size": VOCAB, "num_scores": VOCAB, "num_slots": 1, "max_rows": most}
        drafter.side.passes = _core.DraftPasses(**sizes, max_len=256, max_drafts=4)
        drafter.side.bind_cache(*drafter.pages)

        def sometimes(inputs: DraftInputs) -> None:
            nonlocal calls
            calls += 1
            if not 1 < calls < 12:
                draft(inputs)

        def counted(plan: Any) -> Any:
            rows.append(plan.num_rows)
            return forward(plan)

        drafter.draft, drafter.model.forward = sometimes, counted
        assert run(llm, [PROMPTS[0]], GREEDY) == plain["greedy"][:1]
        counts = llm.get_metrics()["speculative_decoding"]
        assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 8
    assert rows[:5] == [len(PROMPTS[0]), 1, 1, 1, 1]
    assert max(rows[5:]) == min(most, 12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_draft_model_that_raises_costs_its_step_the_drafts(
    folders: dict[str, Path], plain: dict[str, Any], depth: int
) -> None:
    with open_ahead(folders, "near", depth) as llm:
        model, calls = drafter_of(llm).model, 0
        forward = model.forward

        def fails(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                forward(plan)  # it had written into its pages
            if calls % 3 != 1:
                raise RuntimeError("no drafts today")
            return forward(plan)

        model.forward = fails
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == plain["greedy"]
        assert llm.get_metrics()["drafter"]["failures"] > 10


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_nan_in_the_draft_models_pages_never_reaches_a_text(
    folders: dict[str, Path], plain: dict[str, Any], share: float
) -> None:
    """Whatever lies in a page that others have published, or that nobody wrote."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    with open_ahead(folders, "near", 1, kv_cache_config=cache) as llm:
        k_pages, v_pages = drafter_of(llm).pages
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        poisoned = torch.rand(k_pages.shape[1], generator=torch.Generator().manual_seed(1)) < share
        k_pages[:, poisoned] = v_pages[:, poisoned] = float("nan")
        assert run(llm, PROMPTS[:4], GREEDY) == plain["greedy"][:4]
        assert llm.get_metrics()["executor"]["reuse_hits"] >= 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_prefix_reuse_keeps_both_caches(folders: dict[str, Path], depth: int) -> None:
    """Warm says what cold says; the draft model reads what is new alone, and guesses as well."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    prompt = PROMPTS[3]
    with open_llm(folders, None) as llm:
        [first] = tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))
        longer = prompt + first
        [second] = tokens_of(llm.generate([longer], GREEDY, use_tqdm=False))
    with open_ahead(folders, "target", depth, kv_cache_config=cache, spec=CHAIN) as llm:
        assert run(llm, [prompt], GREEDY) == [first]
        before = llm.get_metrics()["drafter"]["rows"]
        assert run(llm, [longer], GREEDY) == [second]
        metrics = llm.get_metrics()
        assert metrics["executor"]["reuse_hits"] == 1
        assert metrics["drafter"]["rows"] - before < len(longer) - 48 + 40
        assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 60


@pytest.mark.parametrize("depth", DEPTHS)
def test_recorded_steps_say_the_same(
    folders: dict[str, Path], plain: dict[str, Any], depth: int
) -> None:
    with open_ahead(folders, "near", depth) as llm:
        pipeline = pipeline_of(llm)
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 1024)
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        assert recorder.recorded > 1
        assert recorder.replayed > 20


def test_requests_with_and_without_drafts_in_one_batch(
    folders: dict[str, Path], plain: dict[str, Any]
) -> None:
    """Plain ones, shorter drafts, and one whose tokens the host chooses."""
    options: list[dict[str, Any]] = [
        {}, {"speculative": False}, {"max_draft_len": 2}, {"logprobs": 1}
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, **options[i % 4])
        for i in range(len(PROMPTS))
    ]
    with open_ahead(folders, "target", 2, 5) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert tokens_of(outputs) == plain["greedy"]
        assert llm.get_metrics()["drafter"]["failures"] == 0
    drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] for out in outputs]
    accepted = [out.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for out in outputs]
    assert [count > 0 for count in drafted] == [True, False, True, True] * 4
    assert drafted == accepted


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("draft", ["target", "near", "far", "short"])
@pytest.mark.parametrize("spec", TREES)
def test_trees_say_what_plain_decoding_says(
    folders: dict[str, Path], plain: dict[str, Any], spec: dict[str, Any], draft: str, depth: int
) -> None:
    with open_ahead(folders, draft, depth, spec=spec) as llm:
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        counts = llm.get_metrics()["speculative_decoding"]
    if draft == "target":  # every level holds the token that comes
        steps = sum(out * n for out, n in enumerate(counts["acceptance_histogram"]))
        assert counts["num_accepted_draft_tokens"] == steps > 250


@pytest.mark.parametrize("spec", TREES)
def test_trees_are_those_of_the_host(folders: dict[str, Path], spec: dict[str, Any]) -> None:
    """The same nodes, so the same counts, whoever samples and whatever limits a request has."""
    laws: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"max_draft_len": 5}]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **laws[i % 3])
        for i in range(len(PROMPTS))
    ]
    seen = []
    for depth in (None, *DEPTHS):
        with open_llm(folders, "near", spec=spec, scheduler={"run_ahead": depth}) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            drafting = llm.get_metrics()["speculative_decoding"]
        seen.append((tokens_of(outputs), drafting["num_draft_tokens"],
                     drafting["num_accepted_draft_tokens"]))  # fmt: skip
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_fewer_pages_than_the_target_cost_drafts_alone(
    folders: dict[str, Path], plain: dict[str, Any], spec: dict[str, Any]
) -> None:
    cache = {"tokens_per_block": 4}
    drafted = []
    for tokens in (None, 80, 4):
        limits = {**spec, "max_kv_tokens": tokens}
        with open_ahead(folders, "target", 1, spec=limits, kv_cache_config=cache) as llm:
            assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
            metrics = llm.get_metrics()
        drafted.append(metrics["speculative_decoding"]["num_draft_tokens"])
        if tokens is not None:
            assert metrics["memory"]["draft_num_pages"] == tokens // 4
    assert drafted[0] > drafted[1] > drafted[2]


def test_prompts_are_read_beside_the_target(folders: dict[str, Path]) -> None:
    """Everybody drafts from the first step behind a prompt: K + 1 tokens of each, whoever waits."""
    prompts = [[(11 * i + 5 * j) % 64 for j in range(60)] for i in range(64)]
    scheduler = {"max_batch_size": 64, "max_num_tokens": 1024}
    with open_ahead(folders, "target", 1, 64, scheduler=scheduler) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        counts = llm.get_metrics()["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]
    # The first token comes from the prompt's own pass, each further one brings five; those who are
    # through first have no rows for drafts while the step is full of others' prompts.
    passes = [out.metrics["num_forward_passes"] for out in outputs]
    decoding = sum(40 - 1 for _ in outputs) / sum(n - 1 for n in passes)
    assert decoding > 4.3


@pytest.mark.default_model
def test_the_shipped_draft_model_runs_ahead(
    default_model_path: Path, tmp_path: Path, capsys: Any
) -> None:
    """From the command line: plain text, fewer passes."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write a list of the numbers from one to twenty.\n")
    argv = ["generate", "--draft_target", "--run-ahead", "1", "--json", "--input_file",
            str(prompts), "--max_output_len", "32", "--max_batch_size", "1", "--verify",
            "--no-adaptive"]  # fmt: skip
    del default_model_path
    capsys.readouterr()
    assert main(argv) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["identical"] is True
    assert line["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 8
    assert line["metrics"]["num_forward_passes"] < 24
