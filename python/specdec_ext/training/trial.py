"""What the result is worth: acceptance and speed of the trained drafter against plain decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.draft_target import DraftTargetDecodingConfig
from ..config.methods import Eagle3DecodingConfig, MedusaDecodingConfig, ReDrafterDecodingConfig
from ..llm import LLM
from ..request.sampling_params import SamplingParams

__all__ = ["FLAGS", "method_config", "try_out"]

# Product -> the option of `specdec generate` that takes the result.
FLAGS = {
    "medusa": "--medusa-model",
    "redrafter": "--redrafter-model",
    "drafter": "--draft-model",
    "eagle3": "--eagle3-model",
}


def method_config(product: str, folder: Path) -> Any:
    """The configuration that uses a result, with the method's defaults."""
    if product == "medusa":
        return MedusaDecodingConfig(str(folder))
    if product == "redrafter":
        return ReDrafterDecodingConfig(str(folder))
    if product == "eagle3":
        return Eagle3DecodingConfig(str(folder))
    return DraftTargetDecodingConfig(str(folder))


def try_out(
    product: str,
    folder: Path,
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    device: str,
) -> dict[str, Any]:
    """Greedy decoding of held-out prompts, one at a time, plain and with the drafter in turn.

    Speed is that of the adaptive budget, as users have it; tokens per pass are measured once more
    with every draft verified.
    """
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    limits = {"max_batch_size": 1, "max_seq_len": longest + 1}
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    equal = 0
    config = method_config(product, folder)
    accepted = drafts = steps = tokens = 0
    with LLM(model, speculative_config=config, device=device, scheduler_config=limits) as llm:

        def decode(ids: Sequence[int], **how: Any) -> tuple[Any, float]:
            params = SamplingParams(max_tokens=max_tokens, **how)
            begin = time.perf_counter()
            [output] = llm.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)
            return output.outputs[0], time.perf_counter() - begin

        whole = type(config)(str(folder), adaptive=False)
        decode(prompts[0])  # buffers are made, rates are learnt
        for i, ids in enumerate(prompts):
            order = ("plain", "drafted") if i % 2 else ("drafted", "plain")
            texts = {}
            for side in order:
                how = {"speculative_config": False} if side == "plain" else {}
                texts[side], took = decode(ids, **how)
                seconds[side].append(took / max(1, len(texts[side].token_ids)))
            every, _ = decode(ids, speculative_config=whole)
            metrics = every.spec_decode_metrics or {}
            accepted += metrics["num_accepted_draft_tokens"]
            drafts += metrics["num_draft_tokens"]
            steps += metrics["num_spec_steps"]
            tokens += len(every.token_ids)
            equal += texts["plain"].token_ids == texts["drafted"].token_ids == every.token_ids
    ratios = [p / d for p, d in zip(seconds["plain"], seconds["drafted"], strict=True)]
    return {
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "tokens": tokens,
        "equal_to_plain": equal,
        "acceptance_rate": round(accepted / max(1, drafts), 4),
        "tokens_per_pass": round(1 + accepted / max(1, steps), 4),
        "speedup": round(statistics.median(ratios), 3),
        "tokens_per_second": {
            side: round(1 / statistics.median(values), 2) for side, values in seconds.items()
        },
    }
