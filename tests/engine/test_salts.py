"""What a tenant wrote shows in nothing of another salt: drafts, acceptance, steps, output.

Fixed draft lengths: what an adaptive budget has learnt of sources and times is the engine's, and
changes how far anybody drafts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from method_cases import HOST, PROMPTS, Folders, Where, methods, open_llm, texts_of

from specdec_ext import LLM, SamplingParams

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


def open_sharing(models: Folders, method: str, where: Where) -> LLM:
    cache = {"tokens_per_block": 8, "max_tokens": 4000, "enable_block_reuse": True}
    return open_llm(models, method, where, kv_cache_config=cache)


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
    models: Folders, method: str, where: Where, first: list[list[int]], **sampling: Any
) -> Any:
    """All that can be seen of the second tenant's requests, the first having decoded `first`."""
    with open_sharing(models, method, where) as llm:
        if first:
            texts_of(llm, params("first", **sampling), first)
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
