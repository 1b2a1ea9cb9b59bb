"""Requests of every kind in a pool that is too small for them, and what each gives alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from method_cases import HOST, PROMPTS, Folders, Where, open_llm

from specdec_ext import (
    LLM,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)

METHODS: dict[str, Any] = {
    "plain": None,
    "ngram": NGramDecodingConfig(4, 2, adaptive=False),
    "lookahead": LookaheadDecodingConfig(4, 3, 4, adaptive=False),
    "medusa": "medusa",
    "redrafter": "redrafter",
    "chain": "chain",
    "tree": "tree",
}
COUNT, PAGE = 30, 4
POOL = {"tokens_per_block": PAGE, "max_tokens": 20 * PAGE}  # one long request, or some short ones
LONG = [prompt[:18] for prompt in PROMPTS]


def double(tokens: list[int], scores: Any) -> Any:
    return scores * 2


def wanted(index: int, **more: Any) -> SamplingParams:
    """Requests of every kind beside each other."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"logprobs": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
        {"temperature": 1.1, "seed": 7, "logits_processors": [double], "logprobs": 0},
        {"prompt_logprobs": 1, "return_generation_logits": True},
        {"external_draft": ExternalDraftTokensConfig([1, 2, 3]), "min_tokens": 5},
    ]
    return SamplingParams(max_tokens=COUNT, ignore_eos=True, **kinds[index % len(kinds)], **more)


def result(output: Any) -> Any:
    one = output.outputs[0]
    logits = None if one.generation_logits is None else one.generation_logits.tolist()
    return (one.token_ids, one.finish_reason, one.logprobs, output.prompt_logprobs, logits)


def open_scarce(models: Folders, method: str, where: Where, **options: Any) -> LLM:
    scheduler = {
        "max_batch_size": 6, "max_seq_len": 64, "max_num_tokens": 40, "policy": "max_utilization",
    }  # fmt: skip
    # Exact: K/V that is computed again in other company has the same bits.
    settings: dict[str, Any] = {"scheduler": scheduler, "kv_cache_config": POOL, **options}
    return open_llm(models, METHODS[method], where, numerics="exact", **settings)


def results_alone(models: Folders) -> Callable[[str], list[Any]]:
    """What each of the requests gives alone on a device."""

    @functools.cache
    def results(device: str) -> list[Any]:
        place = HOST if device == "cpu" else Where(device)
        with open_llm(models, None, place, numerics="exact") as llm:
            return [
                result(llm.generate([prompt], wanted(i), use_tqdm=False)[0])
                for i, prompt in enumerate(LONG)
            ]

    return results


def check_idle(llm: LLM) -> dict[str, Any]:
    stats = dict(llm.get_metrics()["executor"])
    assert stats["free_pages"] == stats["total_pages"]
    assert stats["preempted"] == stats["running"] == stats["retiring"] == 0
    return stats
