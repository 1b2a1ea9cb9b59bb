"""What a tenant wrote shows in nothing of another salt: drafts, acceptance, steps, output.

With fixed draft lengths, and with those that an adaptive budget chooses: what it has learnt of
sources is kept per salt. Seconds of steps and of drafting are the engine's, and change how far
anybody drafts; here they are held.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from method_cases import HOST, METHODS, PROMPTS, Folders, Where, methods, open_llm, texts_of

from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    SamplingParams,
    SuffixDecodingConfig,
)
from specdec_ext.config.sources import AutoDecodingConfig, CompositeDecodingConfig
from specdec_ext.engine.overlap.pipeline import OverlapPipeline
from specdec_ext.engine.slot_drafting import SlotDrafting

# Those that keep something over requests: a pool by salt, outputs, K/V of one model and of two.
SHARING = ["public", "suffix", "suffix past", "chain", "tree"]
STREAM = Where("stream", 1)
NOTHING: list[list[int]] = []
WRITTEN = {
    "nothing": NOTHING,
    "the same": PROMPTS,
    "much the same": [[*prompt[:-1], (prompt[-1] + 1) % 32] for prompt in PROMPTS],
}


def params(salt: str, **sampling: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, ignore_eos=True, cache_salt=salt, **sampling)


def open_sharing(models: Folders, method: Any, where: Where) -> LLM:
    cache = {"tokens_per_block": 8, "max_tokens": 4000, "enable_block_reuse": True}
    return open_llm(models, method, where, kv_cache_config=cache)


def adaptive(models: Folders, name: str) -> Any:
    """The configuration with drafts that pay: one of METHODS, the default, or what it is where a
    drafter is shipped."""
    if name == "auto":
        return AutoDecodingConfig()
    if name == "sources":
        chain = DraftTargetDecodingConfig(models["near"], max_draft_len=4)
        return CompositeDecodingConfig((SuffixDecodingConfig(6, max_cached_requests=4), chain))
    return dataclasses.replace(METHODS[name](models), adaptive=True)


@contextmanager
def held_times(llm: LLM) -> Iterator[None]:
    """No step and no drafting is timed: further rows cost what the table says, drafts nothing."""
    engine: Any = llm.engine
    engine._calibrate = lambda: engine.executor.set_step_cost([1, 128], [1.0, 16.0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SlotDrafting, "_tell_cost", lambda *_: None)
        patched.setattr(OverlapPipeline, "_set_draft_cost", lambda *_: None)
        yield


def watch(llm: LLM) -> list[list[list[int]]]:
    """Tokens of every request's rows in every step from now on."""
    steps: list[list[list[int]]] = []
    forward = llm.model.forward

    def watched(plan: Any, *rest: Any) -> Any:
        bounds, tokens = plan.cu_rows.tolist(), plan.tokens.tolist()
        steps.append([tokens[first:end] for first, end in itertools.pairwise(bounds)])
        return forward(plan, *rest)

    llm.model.forward = watched  # type: ignore[method-assign]
    return steps


def second_tenant(
    models: Folders, method: Any, where: Where, first: list[list[int]], *, salt: str = "first",
    **sampling: Any,
) -> Any:  # fmt: skip
    """All that can be seen of the second tenant's requests, that of `salt` having decoded
    `first`."""
    with open_sharing(models, method, where) as llm, held_times(llm):
        if first:
            texts_of(llm, params(salt, **sampling), first)
        steps = watch(llm)
        seen = []
        for prompt in PROMPTS:  # one by one: which requests meet is no matter of salts
            [output] = llm.generate([prompt], params("second", **sampling), use_tqdm=False)
            m = output.metrics
            seen.append([
                list(output.outputs[0].token_ids), output.num_cached_tokens,
                m["num_forward_passes"], m["num_rows"], m["draft_sources"],
                m["speculative_decoding"],
            ])  # fmt: skip
        return seen, steps


@methods(SHARING)
@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "drawn"])
def test_a_second_tenant_sees_nothing(
    models: Folders, method: str, where: Where, sampling: dict[str, Any]
) -> None:
    found = [second_tenant(models, method, where, text, **sampling) for text in WRITTEN.values()]
    assert found[0] == found[1] == found[2]
    assert sum(entry[5]["num_draft_tokens"] for entry in found[0][0]) > 20


@methods(["public", "suffix past"])
def test_the_same_salt_is_seen(models: Folders, method: str) -> None:
    """The comparison can fail: one tenant's own second call begins with what the first one left."""
    with open_sharing(models, method, HOST) as llm:
        counts = []
        for _ in range(2):
            steps = watch(llm)
            [output] = llm.generate([PROMPTS[2]], params("one"), use_tqdm=False)
            counts.append((len(steps), output.metrics["num_rows"]))
    assert counts[0] != counts[1]


# Two sources draft together only in steps that the host runs.
everywhere = pytest.mark.parametrize(
    ("method", "where"),
    [("sources", HOST), *itertools.product(["auto", *SHARING], [HOST, STREAM])],
    ids=str,
)


@everywhere
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "drawn"])
def test_nor_by_what_pays(
    models: Folders, method: str, where: Where, sampling: dict[str, Any]
) -> None:
    config = adaptive(models, method)
    found = [second_tenant(models, config, where, text, **sampling) for text in WRITTEN.values()]
    assert found[0] == found[1] == found[2]
    assert sum(entry[5]["num_draft_tokens"] for entry in found[0][0]) > 0


@everywhere
def test_what_pays_is_learnt_of_the_same_salt(models: Folders, method: str, where: Where) -> None:
    """The comparison can fail: a tenant's own earlier requests change how much it drafts."""
    config = adaptive(models, method)
    alone, after = (
        [entry[5]["per_step_drafted"] for entry in seen]
        for seen, _ in (
            second_tenant(models, config, where, text, salt="second") for text in (NOTHING, PROMPTS)
        )
    )
    assert alone != after
