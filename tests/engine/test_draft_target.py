"""Draft-target decoding: the target's text, whatever the draft model says or does, at every place.

What any method owes is in test_drafter_contracts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_target_cases import (
    CHAIN,
    DRAFTS,
    GREEDY,
    PROMPTS,
    SAMPLED,
    TREE,
    VOCAB,
    gathered,
    open_llm,
    rebuilt,
    run,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from method_cases import HOST, Folders, Where, drafter_of, each_place, everywhere, on_devices

from specdec_ext import RequestError, SamplingParams, _core
from specdec_ext.drafters import DraftInputs
from specdec_ext.models import load_model
from specdec_ext.models.host_arrays import as_torch

STREAM = Where("stream", 1)
TREES: list[dict[str, Any]] = [
    TREE,
    {"max_draft_len": 6, "top_k": 2, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 30, "top_k": 4, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 12, "top_k": 12, "max_draft_depth": 1, "adaptive": False},
]
SPECS: list[dict[str, Any]] = [
    CHAIN, *TREES, {}, {**TREE, "adaptive": True}, {**CHAIN, "max_draft_len": 1},
    {**CHAIN, "max_draft_len": 9},
]  # fmt: skip


# Emulated, a tree takes up to a minute: one shape for each draft model, the others in test-slow.
DEVICE_CASES = [
    pytest.param(draft, spec, marks=() if j == i % 4 else pytest.mark.slow, id=f"{draft}-{spec}")
    for i, draft in enumerate(DRAFTS)
    for j, spec in enumerate((TREE, CHAIN, {}, SPECS[-1], *TREES[1:], *SPECS[-3:-1]))
]


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_output_is_that_of_plain_decoding(
    folders: Folders, plain: dict[str, Any], draft: str, spec: dict[str, Any], where: Where
) -> None:
    """Chains and trees, every draft model and batch: near, far, deep, of few positions."""
    check_output(folders, plain, draft, spec, where)


@on_devices
@pytest.mark.parametrize(("draft", "spec"), DEVICE_CASES)
def test_a_devices_output_is_that_of_plain_decoding(
    folders: Folders, plain: dict[str, Any], draft: str, spec: dict[str, Any], where: Where
) -> None:
    check_output(folders, plain, draft, spec, where)


def check_output(
    folders: Folders, plain: dict[str, Any], draft: str, spec: dict[str, Any], where: Where
) -> None:
    batch = (1, 3, 16)[(DRAFTS.index(draft) + SPECS.index(spec)) % 3]
    n = 4 if batch == 1 or where.device != "cpu" else len(PROMPTS)
    with open_llm(folders, draft, batch, where=where, spec=spec) as llm:
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        assert llm.get_metrics()["memory"]["draft_num_pages"] == llm.memory.num_pages


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_target_and_draft_may_differ_in_type_and_implementation(
    folders: Folders, dtype: str, impl: str, where: Where
) -> None:
    with open_llm(folders, None, dtype="bfloat16") as llm:
        expected = run(llm, PROMPTS[:4], GREEDY)
    spec = {**CHAIN, "dtype": dtype, "model_impl": impl}
    with open_llm(folders, "target", where=where, spec=spec, dtype="bfloat16") as llm:
        assert run(llm, PROMPTS[:4], GREEDY) == expected
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 50


@everywhere
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_draft_model_equal_to_the_target_is_right_every_time(
    folders: Folders, plain: dict[str, Any], params: SamplingParams, length: int, where: Where
) -> None:
    """Sampled drafts are drawn with the number that the target draws with."""
    spec, n = {**CHAIN, "max_draft_len": length}, len(PROMPTS) if where.device == "cpu" else 4
    with open_llm(folders, "target", where=where, spec=spec) as llm:
        assert (
            run(llm, PROMPTS[:n], params) == plain["greedy" if params is GREEDY else "sampled"][:n]
        )
        metrics = llm.get_metrics()
    counts = metrics["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]
    steps = -(-39 // (length + 1))  # the first token comes from the prompt's own pass
    assert counts["num_draft_tokens"] == n * (39 - steps)
    if where.device != "cpu":  # a device's passes are padded
        return
    # Every prompt once, every token once, and the padding of no pass.
    assert metrics["drafter"]["rows"] <= sum(map(len, PROMPTS[:n])) + 39 * n


@each_place
@pytest.mark.parametrize("spec", TREES, ids=str)
def test_every_level_of_a_tree_holds_the_token_that_comes(
    folders: Folders, plain: dict[str, Any], spec: dict[str, Any], where: Where
) -> None:
    with open_llm(folders, "target", where=where, spec=spec) as llm:
        n = len(PROMPTS) if where.device == "cpu" else 4
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        counts = llm.get_metrics()["speculative_decoding"]
    steps = sum(out * k for out, k in enumerate(counts["acceptance_histogram"]))
    assert counts["num_accepted_draft_tokens"] == steps > 15 * n


def test_a_tree_brings_more_than_its_chain(folders: Folders) -> None:
    passes = {}
    for name, spec in (("chain", CHAIN), ("tree", {**TREE, "max_draft_len": 16})):
        with open_llm(folders, "near", spec=spec) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        passes[name] = sum(out.metrics["num_forward_passes"] for out in outputs)
    assert passes["tree"] < passes["chain"] < 40 * len(PROMPTS)


# -- what the draft model has read ----------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("page", [1, 4, 32])
@pytest.mark.parametrize("draft", ["target", "near", "far"])
def test_in_every_round_the_kv_is_that_of_the_text_read_afresh(
    folders: Folders, plain: dict[str, Any], draft: str, page: int, every: int
) -> None:
    """Bit for bit in front of what a round reads, after partial and after full acceptance, and
    where only every third step drafts."""
    cache = {"tokens_per_block": page}
    with open_llm(folders, draft, where=STREAM, kv_cache_config=cache) as llm:
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
                    mine = gathered(*map(as_torch, drafter.pages), rest[0][b].tolist(), end)
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
    folders: Folders, plain: dict[str, Any], most: int
) -> None:
    """In one pass, or in pieces of as many rows as fit."""
    with open_llm(folders, "target", 1, where=STREAM) as llm:
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


@each_place
def test_prefix_reuse_keeps_both_caches(folders: Folders, where: Where) -> None:
    """The draft model reads what is new alone, and guesses as well."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    with open_llm(folders, None) as llm:
        [first] = run(llm, [PROMPTS[3]], GREEDY)
        longer = PROMPTS[3] + first
        [second] = run(llm, [longer], GREEDY)
    with open_llm(folders, "target", where=where, kv_cache_config=cache) as llm:
        assert run(llm, [PROMPTS[3]], GREEDY) == [first]
        before = llm.get_metrics()["drafter"]["rows"]
        assert run(llm, [longer], GREEDY) == [second]
        metrics = llm.get_metrics()
        assert metrics["executor"]["reuse_hits"] == 1
        assert metrics["drafter"]["rows"] - before < len(longer) - 48 + 40
        assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 60


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_prompts_are_read_with_the_target(folders: Folders, where: Where) -> None:
    """Everybody drafts from the first step behind a prompt: K + 1 tokens of each, whoever waits."""
    prompts = [[(11 * i + 5 * j) % 64 for j in range(60)] for i in range(64)]
    scheduler = {"max_num_tokens": 1024, "max_prefill_slowdown": None}  # no clock decides
    with open_llm(folders, "target", 64, where=where, scheduler=scheduler) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        counts = llm.get_metrics()["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"]
    # The first token comes from the prompt's own pass, each further one brings five; those who are
    # through first have no rows for drafts while the step is full of others' prompts.
    passes = [out.metrics["num_forward_passes"] for out in outputs]
    assert sum(40 - 1 for _ in outputs) / sum(n - 1 for n in passes) > 4.3


# -- per request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_requests_with_and_without_drafts_share_steps(
    folders: Folders, plain: dict[str, Any], where: Where
) -> None:
    def params(**kwargs: Any) -> SamplingParams:
        return SamplingParams(max_tokens=40, ignore_eos=True, **kwargs)

    each = [
        params(),
        params(speculative=False),
        SamplingParams.from_dict({"max_tokens": 40, "ignore_eos": True, "num_draft_tokens": 2}),
        params(max_draft_len=0),
        params(use_draft_logits=False),
    ]
    with open_llm(folders, "target", 5, where=where) as llm:
        outputs = llm.generate(PROMPTS[:5], each, use_tqdm=False)
        with pytest.raises(RequestError, match="max_draft_len = 5 is greater than the engine's 4"):
            llm.generate([1], params(max_draft_len=5), use_tqdm=False)
        with pytest.raises(RequestError, match="use_draft_logits = True with acceptance"):
            llm.generate([1], params(use_draft_logits=True, temperature=1.0), use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain["greedy"][:5]
    passes = [out.metrics["num_forward_passes"] for out in outputs]
    assert passes == [1 + 8, 40, 1 + 13, 40, 1 + 8]
    with (
        open_llm(folders, None) as llm,
        pytest.raises(RequestError, match="use_draft_logits = True: this engine has no draft"),
    ):
        llm.generate([1], params(use_draft_logits=True), use_tqdm=False)


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_min_confidence_ends_a_chain(folders: Folders, plain: dict[str, Any], where: Where) -> None:
    """Behind a draft that is not sure enough: the first one is always there."""
    drafted = []  # a step
    for floor in (0.0, 0.1, 0.5, 1.0):
        spec = {**CHAIN, "min_confidence": floor}
        with open_llm(folders, "near", where=where, spec=spec) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            counts = llm.get_metrics()["speculative_decoding"]
        assert [list(out.outputs[0].token_ids) for out in outputs] == plain["greedy"]
        steps = sum(out.metrics["num_forward_passes"] - 1 for out in outputs)
        drafted.append(counts["num_draft_tokens"] / steps)
    assert 4 >= drafted[0] > drafted[1] > drafted[2] > drafted[3]
    assert 0.9 < drafted[3] <= 1
