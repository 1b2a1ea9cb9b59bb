"""Several sources in one step: texts are plain decoding's, trees are merged, and the method that
costs more is asked where what is at hand is not worth more."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import (
    GREEDY,
    METHODS,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    at_every_depth,
    open_llm,
    texts_of,
)

from specdec_ext import (
    LLM,
    CompositeDecodingConfig,
    LookaheadDecodingConfig,
    ReDrafterDecodingConfig,
    SamplingParams,
    SuffixDecodingConfig,
    UnsupportedConfigError,
    _core,
)
from specdec_ext.drafters.late import LateDrafter

BESIDE = ("medusa", "redrafter", "chain", "tree", "lookahead")


def composite(models: Folders, method: str, adaptive: bool = False) -> CompositeDecodingConfig:
    drafter = METHODS[method](models)
    suffix = SuffixDecodingConfig(6, min_token_prob=0.05)
    config = CompositeDecodingConfig(sources=(suffix, drafter))
    if not adaptive:
        return config
    on = tuple(dataclasses.replace(source, adaptive=True) for source in config.sources)
    return CompositeDecodingConfig(sources=on)


@pytest.mark.parametrize("method", BESIDE)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_texts_are_those_of_plain_decoding(
    models: Folders, plain_texts: dict[str, list[list[int]]], method: str, depth: int
) -> None:
    """Greedy, and sampled with the same seed; both sources have drafts accepted."""
    config = composite(models, method)
    with LLM(
        models["target"],
        speculative_config=config,
        scheduler_config={"max_batch_size": 3, "max_seq_len": 128, "overlap_depth": depth},
    ) as llm:
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        assert texts_of(llm, SAMPLED) == plain_texts["sampled"]
        counts = llm.get_metrics()["draft_sources"]
    assert set(counts) == {"suffix", config.drafter.method}
    assert counts["suffix"]["accepted"] > 0
    for count in counts.values():
        assert 0 <= count["accepted"] <= count["drafts"]


@pytest.mark.parametrize("method", ["medusa", "lookahead"])
def test_adaptive_texts_are_those_of_plain_decoding(
    models: Folders, plain_texts: dict[str, list[list[int]]], method: str
) -> None:
    with LLM(models["target"], speculative_config=composite(models, method, adaptive=True)) as llm:
        llm.engine.executor.set_step_cost([1, 128], [1.0, 2.0])
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        assert texts_of(llm, SAMPLED) == plain_texts["sampled"]


def test_a_request_takes_some_of_the_sources(
    models: Folders, plain_texts: dict[str, list[list[int]]]
) -> None:
    config = composite(models, "medusa")
    asked: dict[str, Any] = {
        "suffix": SuffixDecodingConfig(4),
        "medusa": {"method": "medusa", "medusa_choices": [[0], [1]]},
        "both": ["suffix", "medusa"],
        "none": False,
        "short": {"max_draft_len": 1},
    }
    with LLM(models["target"], speculative_config=config) as llm:
        for name, value in asked.items():
            params = SamplingParams(max_tokens=24, ignore_eos=True, speculative_config=value)
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
            assert [o.outputs[0].token_ids for o in outputs] == plain_texts["greedy"]
            counts: dict[str, int] = {}
            for output in outputs:
                for source, count in output.metrics["draft_sources"].items():
                    counts[source] = counts.get(source, 0) + count["drafts"]
                steps = output.metrics["speculative_decoding"]["per_step_drafted"]
                assert max(steps, default=0) <= (2 if name == "short" else 127)
            expected = {"suffix": {"suffix"}, "medusa": {"medusa"}, "none": set()}
            assert set(counts) == expected.get(name, {"suffix", "medusa"})


@at_every_depth
def test_lookahead_beside_suffix_everywhere(
    models: Folders, plain_texts: dict[str, list[list[int]]], where: Where
) -> None:
    """Where steps are enqueued on a stream such requests are decided by the host."""
    with open_llm(models, composite(models, "lookahead"), where) as llm:
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        assert llm.get_metrics()["draft_sources"]["suffix"]["accepted"] > 0


def test_operations_on_a_stream_are_refused() -> None:
    executor = _core.Executor(
        vocab_size=16, max_batch_size=2, max_seq_len=32, max_num_tokens=64, num_pages=16,
        page_size=4, method="proposed", proposed_max_draft_len=4, with_suffix=True,
    )  # fmt: skip
    words = executor.staging_layout.words
    rings: dict[str, Any] = {
        "staging": np.zeros((executor.ring_size, words), np.int32),
        "entries": np.zeros((executor.ring_size, executor.entry_bytes), np.uint8),
        "results": np.zeros((executor.ring_size, executor.result_words), np.int32),
        "scores": np.zeros((executor.ring_size, executor.max_host_rows, 16), np.float32),
        "trees": np.zeros((executor.ring_size, 2, executor.tree_words), np.int32),
    }
    with pytest.raises(ValueError, match="with_suffix beside drafts of operations"):
        executor.bind_rings(**rings)


# -- which source is asked ------------------------------------------------------------------------

REPEATS = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]
VAGUE = [
    1,
    2,
    8,
    3,
    4,
    8,
    5,
    6,
    8,
    7,
]  # what follows the 8 that is decided next is different each time
FRESH = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]


def staged(prompt: list[int], seconds: float, draft_seconds: float, **options: Any) -> Any:
    """The first step that decodes, of an engine with suffix decoding and a network beside it;
    T(128) = `seconds`, T(1) = 1, the network takes draft_seconds."""
    pages = torch.zeros(1, 128, 1, 4, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=16, max_batch_size=1, max_seq_len=128,
        max_num_tokens=256, method="proposed", proposed_max_draft_len=8, proposed_max_path=4,
        suffix={"max_draft_len": 10, "min_token_prob": 0.1}, with_suffix=True, **options,
    )  # fmt: skip
    executor.set_step_cost([1, 128], [1.0, seconds])
    executor.set_draft_cost(draft_seconds, 0.0)
    executor.submit(prompt, max_tokens=60)
    plan = executor.plan()
    executor.commit(plan, torch.full((plan.num_logit_rows,), 8, dtype=torch.int32))
    return executor.stage()


@pytest.mark.parametrize(
    ("prompt", "seconds", "draft_seconds", "found", "asked"),
    [
        # Little is at hand and rows are free: both.
        (VAGUE, 1.0, 0.1, True, True),
        (VAGUE, 1.0, 3.0, True, False),
        # Nothing is at hand: the network is worth a fifth of a step, not three.
        (FRESH, 1.0, 0.2, False, True),
        (FRESH, 1.0, 3.0, False, False),
        # A long match is at hand, which is worth more than a network that takes time.
        (REPEATS, 1.0, 0.2, True, False),
        # Rows are so dear that neither pays.
        (REPEATS, 500.0, 0.2, False, False),
        (FRESH, 500.0, 0.0, False, False),
    ],
)
def test_the_network_is_asked_where_what_is_at_hand_is_not_worth_more(
    prompt: list[int], seconds: float, draft_seconds: float, found: bool, asked: bool
) -> None:
    step = staged(prompt, seconds, draft_seconds)
    assert (step.most_asked > 0) is asked
    at_hand = step.max_decode_rows - 1 - step.most_asked
    assert (at_hand > 0) is found


def test_fixed_sources_draft_all_they_can() -> None:
    step = staged(REPEATS, 500.0, 3.0, adaptive=False)
    assert step.most_asked == 8
    assert step.max_decode_rows == 1 + 8 + 8  # the text repeats its last 8 tokens


# -- trees ----------------------------------------------------------------------------------------


def merged(trees: list[tuple[list[int], list[int]]]) -> set[tuple[int, ...]]:
    """All paths of trees of (tokens, parents), parents among a tree's own nodes, -1: the root."""
    paths: set[tuple[int, ...]] = set()
    for tokens, parents in trees:
        own: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            own.append((*(own[parent] if parent >= 0 else ()), token))
        paths |= set(own)
    return paths


def test_the_tree_of_a_step_is_both_trees_merged() -> None:
    """A step's rows are the paths of suffix decoding and of the network, equal ones once."""
    pages = torch.zeros(1, 64, 1, 4, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=16, max_batch_size=1, max_seq_len=128,
        max_num_tokens=256, method="proposed", proposed_max_draft_len=8, proposed_max_path=4,
        suffix={"max_draft_len": 10, "min_token_prob": 0.0}, with_suffix=True, adaptive=False,
    )  # fmt: skip
    executor.submit([1, 2, 3, 1, 2, 4, 1, 2], max_tokens=60)
    plan = executor.plan()
    executor.commit(plan, torch.full((plan.num_logit_rows,), 1, dtype=torch.int32))
    step = executor.stage()
    # What follows "1" in the text: 2, then 3, 4 or the 1 that was decided.
    tokens, parents = [2, 3, 9, 4, 1], [-1, 0, 0, -1, 3]
    slots = torch.as_tensor(executor.host_slots)
    from specdec_ext import ops

    ops.propose_drafts(
        executor.slot_layout,
        slots,
        slot_ids=torch.zeros(1, dtype=torch.int32),
        tokens=torch.tensor([tokens], dtype=torch.int32),
        parents=torch.tensor([parents], dtype=torch.int32),
        vocab_size=16,
        status=torch.zeros(1, dtype=torch.int32),
    )
    assert step.most_asked == 8
    plan = executor.build()
    rows, above = list(plan.tokens)[1:], [p - 1 for p in list(plan.parents)[1:]]
    found = merged([(rows, above)])
    assert len(found) == len(rows)  # nothing twice
    assert merged([(tokens, parents)]) <= found
    assert {(2,), (2, 3), (2, 4), (2, 1)} <= found


# -- a drafter that is loaded later ---------------------------------------------------------------


class _Recorded:
    name, needs_hidden = "recorded", True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def enter(self, slot: int, options: Any) -> None:
        self.calls.append(("enter", slot, options))

    def draft(self, inputs: Any) -> None:
        self.calls.append(("draft", inputs))

    def stats(self) -> dict[str, Any]:
        return {"memory_bytes": 7, "device": "cpu"}


def test_a_late_drafter_hears_who_entered_before_it_was_loaded() -> None:
    drafter = _Recorded()
    late = LateDrafter("recorded", lambda: drafter)  # type: ignore[arg-type,return-value]
    late.enter(0, {"a": 1})
    late.enter(2, {})
    late.enter(0, {"a": 2})  # another request took the slot
    late.draft(None)  # type: ignore[arg-type]
    assert drafter.calls == []
    assert late.stats() == {"memory_bytes": 0, "device": "cpu", "loaded": False}
    late.prepare()
    late.enter(1, {"b": 3})
    late.draft("inputs")  # type: ignore[arg-type]
    assert drafter.calls == [
        ("enter", 0, {"a": 2}), ("enter", 2, {}), ("enter", 1, {"b": 3}), ("draft", "inputs"),
    ]  # fmt: skip
    assert late.stats() == {"memory_bytes": 7, "device": "cpu", "loaded": True}


def test_auto_without_a_shipped_drafter_is_suffix_decoding(
    models: Folders, plain_texts: dict[str, list[list[int]]]
) -> None:
    with LLM(models["target"]) as llm:
        assert llm.speculative_config == SuffixDecodingConfig()
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        assert texts_of(llm, SAMPLED) == plain_texts["sampled"]


def test_auto_of_the_default_model() -> None:
    """Its drafter is loaded when it is asked first, and texts are plain decoding's."""
    prompts = ["def add(a, b):", "Once upon a time"]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    sampled = dataclasses.replace(greedy, temperature=1.0, seed=3)
    small: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64}
    with LLM(speculative_config=None, **small) as llm:
        plain = [llm.generate(prompts, p, use_tqdm=False) for p in (greedy, sampled)]
        assert llm.speculative_config is None
    with LLM(**small) as llm:
        assert isinstance(llm.speculative_config, CompositeDecodingConfig)
        assert isinstance(llm.speculative_config.drafter, ReDrafterDecodingConfig)
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.get_metrics()["drafter"]["loaded"] is False
        llm.engine.executor.set_step_cost([1, 128], [1.0, 1.0])  # rows are free
        for params, expected in zip((greedy, sampled), plain, strict=True):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for got, want in zip(outputs, expected, strict=True):
                assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert llm.get_metrics()["drafter"]["loaded"] is True


def test_what_cannot_be_combined_is_refused(models: Folders) -> None:
    suffix = SuffixDecodingConfig()
    plain = LookaheadDecodingConfig(1, 1, 0)
    for sources in ((suffix,), (suffix, suffix), (suffix, plain), ()):
        with pytest.raises(UnsupportedConfigError, match="name these two"):
            CompositeDecodingConfig(sources=sources)
